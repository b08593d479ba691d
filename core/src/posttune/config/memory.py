"""What decides how much memory training takes: the optimiser, and where things are kept."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from posttune.config.base import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Strict

OptimizerName = Literal[
    "adamw",
    "adafactor",
    "torchao_adamw",
    "torchao_adamw_8bit",
    "torchao_adamw_4bit",
    "bnb_adamw_8bit",
]
Tenant = Literal["policy", "critic", "reference", "optimizer"]


class OptimizerConfig(Strict):
    """The optimiser, with warm-up and a schedule. AdamW: Loshchilov & Hutter 2019, arXiv:1711.05101."""

    name: OptimizerName = Field(
        default="adamw",
        description="adamw and adafactor are torch's; torchao_* and bnb_* those of torchao and bitsandbytes. "
        "8 and 4 bits are those of the moments (arXiv:2110.02861). adafactor (arXiv:1804.04235) keeps a row "
        "and a column of them, and takes no betas and no eps from here.",
    )
    lr: NonNegativeFloat = Field(default=1e-5, description="Peak learning rate.")
    betas: list[float] = Field(
        default_factory=lambda: [0.9, 0.999],
        min_length=2,
        max_length=2,
        description="Decay of the mean and of the mean square of gradients.",
    )
    eps: PositiveFloat = Field(default=1e-8, description="Added to the root of the mean square.")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="Not applied to vectors (norms, biases).")
    warmup_steps: NonNegative = Field(default=0, description="Steps of linear warm-up.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="After the warm-up."
    )
    min_lr_ratio: Fraction = Field(default=0.0, description="Floor of the schedule, as a share of lr.")
    grad_clip: NonNegativeFloat = Field(default=1.0, description="Largest global gradient norm; 0 is off.")
    stochastic_rounding: bool = Field(
        default=False,
        description="Round bfloat16 weights up or down by chance, so that updates smaller than their last "
        "bit count on average. Of torchao's optimisers.",
    )
    offload: bool = Field(
        default=False,
        description="Keep the moments in the host's memory; in a step those of one weight after the other "
        "visit the device.",
    )
    in_backward: bool = Field(
        default=False,
        description="Move each weight as soon as its gradient is there, and give the gradient up: at no time "
        "do all gradients exist. Needs grad_clip: 0, one process, and one micro-batch to an optimiser step.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.stochastic_rounding and not self.name.startswith("torchao"):
            raise ValueError(
                "stochastic_rounding is torchao's: set name: torchao_adamw or torchao_adamw_8bit"
            )
        if self.in_backward and self.grad_clip:
            raise ValueError(
                "in_backward moves weights before the norm of the whole gradient is known, so nothing can "
                "be clipped by it: set grad_clip: 0, or leave in_backward out"
            )
        return self


class MemoryConfig(Strict):
    """Where things are kept while they are not in use, and how much is made at a time."""

    logits_mib: Positive = Field(
        default=256,
        description="Logits that exist at a time, MiB of float32. Larger ones are made in pieces, once more "
        "in the backward pass.",
    )
    offload: list[Tenant] = Field(
        default_factory=list,
        description="What waits in the host's memory while it is not in use: policy, critic, reference, "
        "optimizer (the moments, between updates).",
    )
    activations: Literal["device", "host"] = Field(
        default="device",
        description="Where what the forward pass leaves for the backward pass waits.",
    )

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        if len(set(self.offload)) < len(self.offload):
            raise ValueError("offload names something twice")
        return self
