"""When checkpoints are written, how, and which of them stay."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from posttune.config.base import NonNegative, Positive, Strict


class BestConfig(Strict):
    """A metric of the validation, and which way it is better."""

    metric: str = Field(description="Such as val/accuracy.")
    mode: Literal["max", "min"] | None = Field(
        default=None, description="Which way is better; min for a loss, else max."
    )

    @property
    def sign(self) -> int:
        """1 where more is better, else -1."""
        mode = self.mode or ("min" if self.metric.endswith("loss") else "max")
        return 1 if mode == "max" else -1

    def better(self, value: float, than: float | None) -> bool:
        """Whether ``value`` is better. NaN is better than nothing at all."""
        return than is None or self.sign * value > self.sign * than


def _text_or_mapping(value: object) -> str:
    return "<mapping>" if isinstance(value, dict | BaseModel) else "<text or a mapping>"


BestRef = Annotated[
    Annotated[str, Tag("<text or a mapping>")] | Annotated[BestConfig, Tag("<mapping>")],
    Discriminator(_text_or_mapping),
]


class CheckpointConfig(Strict):
    """When checkpoints are written."""

    every: NonNegative = Field(default=0, description="Steps between checkpoints; 0: only at the end.")
    keep_last: Positive | None = Field(default=None, description="Older ones are removed; none: keep all.")
    keep_best: BestRef | None = Field(
        default=None, description="Save whenever this validation metric is at its best, and keep that one."
    )
    async_save: bool = Field(
        default=False,
        description="Write in the background while training goes on; the state is copied to host memory.",
    )

    @property
    def best(self) -> BestConfig | None:
        """What to keep the best by."""
        return BestConfig(metric=self.keep_best) if isinstance(self.keep_best, str) else self.keep_best
