"""The options that SGLang alone has; sampling and resources are core's."""

from __future__ import annotations

from typing import Any, Literal

from posttune.engines.options import CommonOptions
from pydantic import Field


class SglangOptions(CommonOptions):
    """Options of the `sglang` engine."""

    enforce_eager: bool | None = Field(
        None, description="No CUDA graphs. Defaults to true on a CPU and false on a GPU."
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
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments of SGLang's ServerArgs, checked against its own names.",
    )
