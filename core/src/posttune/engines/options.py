"""The options that every engine in a process has; a plugin adds its own."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class CommonOptions(BaseModel):
    """Options of an engine with weights of its own."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    cache_mb: int | None = Field(
        None,
        gt=0,
        description="Memory of the key-value cache, MB. Defaults to what the share of a GPU leaves; on a "
        "CPU to what resources.max_sequences sequences need, at most 2048.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="Of the engine's weights; defaults to the trainer's."
    )
    prefix_caching: bool = Field(
        True, description="Keep the cache of prompts that were seen, until new weights."
    )
    bucket_mb: int = Field(
        512, gt=0, description="Weights handed over at a time, MB; a larger tensor goes by itself."
    )
    verify: Literal["first", "always", "never"] = Field(
        "first",
        description="After which loads every tensor is read back from the engine and compared by checksum.",
    )
    sleep: bool = Field(True, description="On a GPU: free the engine's memory while the trainer works.")
    start_timeout_s: float = Field(900.0, gt=0, description="Seconds that the engine may take to start.")
