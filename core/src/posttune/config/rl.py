"""Parts of the configuration of an RL stage: loss, distance to the reference, batches, guards."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from posttune.config.base import NonNegative, NonNegativeFloat, PluginRef, Positive, PositiveFloat, Strict

OnAlarm = Literal["warn", "stop"]


class KLConfig(Strict):
    """Distance to the reference model, which is the stage's starting model."""

    where: Literal["none", "loss", "reward"] = Field(default="none", description="Where the term is applied.")
    estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"] = Field(
        default="k3", description='Estimator; "+" takes the gradient of k2.'
    )
    coef: NonNegativeFloat = Field(default=0.001, description="Weight of the term.")
    target: PositiveFloat | None = Field(
        default=None, description="Adaptive: the KL that the controller aims at."
    )
    horizon: Positive = Field(
        default=10_000, description="Adaptive: samples over which the controller moves."
    )


class LossConfig(PluginRef):
    """The policy loss and how its tokens are averaged."""

    name: str = Field(default="ppo_clip", description="Policy loss.")
    aggregation: (
        Literal[
            "token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_sum_norm", "seq_mean_token_mean"
        ]
        | None
    ) = Field(default=None, description="Defaults to what the loss names.")
    entropy_coef: NonNegativeFloat = Field(default=0.0, description="Weight of the entropy bonus.")


class RlBatchConfig(Strict):
    """How a step's samples become optimiser steps."""

    prompts: Positive = Field(default=64, description="Prompts per step, over all ranks.")
    mini_batches: Positive = Field(default=1, description="Optimiser steps per pass over the step's samples.")
    epochs: Positive = Field(default=1, description="Passes over the step's samples.")
    drop_constant_groups: bool = Field(
        default=False,
        description="Leave out prompts whose rewards are all equal; no mean counts them then.",
    )


class DynamicSamplingConfig(Strict):
    """Prompts whose rewards are all equal are dropped and others take their place (arXiv:2503.14476)."""

    max_refills: NonNegative = Field(
        default=3, description="Further rounds of prompts in a step; then it goes on with what there is."
    )


class MismatchConfig(Strict):
    """What is done about log-probabilities of the rollout engine that differ from the trainer's."""

    correction: Literal["none", "truncated_token", "truncated_sequence", "mask_token", "mask_sequence"] = (
        Field(
            default="none",
            description="Weigh each token or sequence by pi_trainer / pi_rollout, cut at the cap, or leave "
            "out those whose weight lies outside floor .. cap.",
        )
    )
    cap: PositiveFloat = Field(default=2.0, description="Largest weight.")
    floor: NonNegativeFloat = Field(default=0.0, description="Smallest weight that a mask keeps.")
    alarm: PositiveFloat | None = Field(
        default=None, description="Mean |gap| of the log-probabilities, nats a token, that raises the alarm."
    )
    on_alarm: OnAlarm = Field(default="warn", description="Say so, or checkpoint and end the run.")


class AlarmsConfig(Strict):
    """Signs of a collapse. Each alarm that is set appears as alarm/<name>: 1 while it rings, else 0."""

    entropy_below: PositiveFloat | None = Field(
        default=None, description="Mean entropy of the policy, nats a token."
    )
    reward_std_below: PositiveFloat | None = Field(
        default=None, description="Standard deviation of the rewards of a step."
    )
    length_above: PositiveFloat | None = Field(default=None, description="Mean tokens of a completion.")
    length_below: PositiveFloat | None = Field(default=None, description="Mean tokens of a completion.")
    patience: Positive = Field(default=3, description="Steps in a row before an alarm rings.")
    on_alarm: OnAlarm = Field(default="warn", description="Say so, or checkpoint and end the run.")
