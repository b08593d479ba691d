"""The options that SGLang alone has; sampling and resources are core's."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class SglangOptions(BaseModel):
    """Options of the `sglang` engine."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    cache_mb: int | None = Field(
        None,
        gt=0,
        description="Memory of the key-value cache, MB. Defaults to what the share of a GPU leaves; on a "
        "CPU to what resources.max_sequences sequences need, at most 2048.",
    )
    enforce_eager: bool | None = Field(
        None, description="No CUDA graphs. Defaults to true on a CPU and false on a GPU."
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="Of the engine's weights; defaults to the trainer's."
    )
    prefix_caching: bool = Field(
        True, description="Keep the cache of prompts that were seen, until new weights."
    )
    attention_backend: str | None = Field(
        None,
        description="SGLang's attention. Defaults to torch_native on a CPU and SGLang's choice on a GPU.",
    )
    logprobs: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Log-probabilities of the sampled tokens: where the trainer asks for them, always, or "
        "never. They cost SGLang about a tenth of its speed.",
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
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments of SGLang's ServerArgs, checked against its own names.",
    )
