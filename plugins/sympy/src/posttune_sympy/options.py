"""The options of the reward."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class MathOptions(BaseModel):
    """What counts as an answer, and as the same answer."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    format: Literal["any", "marked", "boxed"] = Field(
        "any",
        description="Where an answer may stand: anywhere; only marked (rows 1 to 4 of the table); in a box.",
    )
    boxes: Literal["auto", "last", "all"] = Field(
        "auto",
        description="Several boxes: the last one counts; all of them as a list; or as many as the reference "
        "has values.",
    )
    percent: Literal["either", "fraction", "number"] = Field(
        "either", description="What 50% equals: 0.5 and 50; only 0.5; only 50."
    )
    units: Literal["ignore", "match"] = Field(
        "ignore", description="Units are left out; or where both sides have one it must be the same."
    )
    rounding_digits: int = Field(
        4,
        ge=0,
        description="A decimal of at least so many digits equals what it rounds: 0.3333 and 1/3. 0: never.",
    )
    tolerance: float = Field(0.0, ge=0, lt=1, description="Relative error that is forgiven in numbers.")
    time_limit: float = Field(5.0, gt=0, le=600, description="Seconds that SymPy may work on one answer.")
