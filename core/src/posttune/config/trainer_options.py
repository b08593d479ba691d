"""What the trainers of the Python API take as ``config``, and the run that it means.

Every field that is given has a place in the configuration of a run; what is not given keeps the
default that the configuration has. Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from posttune.config.base import Execution
from posttune.config.models import (
    NonNegative,
    NonNegativeFloat,
    PluginRef,
    Positive,
    PositiveFloat,
    Strict,
)

KL_TARGET = 0.03
GROUP = 8  # answers per prompt where the estimator compares them


@dataclass(frozen=True)
class Goes:
    """Where a field stands in the stage, as dotted paths."""

    paths: tuple[str, ...]


def goes(*paths: str) -> Goes:
    """Marks a field with its places in the stage."""
    return Goes(paths)


class TrainingOptions(Strict):
    """``config["training"]``."""

    batch_size: Annotated[Positive | None, goes("batch.prompts")] = Field(
        default=None, description="Prompts answered in one step."
    )
    mini_batch_size: Positive | None = Field(
        default=None, description="Prompts of one optimiser step; the whole batch where none is given."
    )
    num_epochs: Annotated[Positive | None, goes("batch.epochs")] = Field(
        default=None, description="Optimisation passes over each batch of answers."
    )
    total_epochs: Positive | None = Field(
        default=None, description="Passes over the data in all; needed by a schedule, and shown in the log."
    )
    lr: Annotated[NonNegativeFloat | None, goes("optimizer.lr", "critic.optimizer.lr")] = Field(
        default=None, description="Peak learning rate, the critic's too unless critic_lr is given."
    )
    critic_lr: Annotated[NonNegativeFloat | None, goes("critic.optimizer.lr")] = Field(
        default=None, description="Peak learning rate of the critic."
    )
    grad_clip: Annotated[
        NonNegativeFloat | None, goes("optimizer.grad_clip", "critic.optimizer.grad_clip")
    ] = Field(default=None, description="Largest global gradient norm; 0 is off.")
    weight_decay: Annotated[
        NonNegativeFloat | None, goes("optimizer.weight_decay", "critic.optimizer.weight_decay")
    ] = Field(default=None, description="Not applied to vectors (norms, biases).")
    betas: Annotated[list[float] | None, goes("optimizer.betas", "critic.optimizer.betas")] = Field(
        default=None, description="AdamW's two decay rates."
    )
    eps: Annotated[PositiveFloat | None, goes("optimizer.eps", "critic.optimizer.eps")] = Field(
        default=None, description="AdamW's epsilon."
    )
    warmup_steps: Annotated[
        NonNegative | None, goes("optimizer.warmup_steps", "critic.optimizer.warmup_steps")
    ] = Field(default=None, description="Steps of linear warm-up.")
    schedule: Annotated[
        Literal["constant", "linear", "cosine"] | None,
        goes("optimizer.schedule", "critic.optimizer.schedule"),
    ] = Field(default=None, description="After the warm-up.")
    min_lr_ratio: Annotated[
        Annotated[float, Field(ge=0, le=1)] | None,
        goes("optimizer.min_lr_ratio", "critic.optimizer.min_lr_ratio"),
    ] = Field(default=None, description="Floor of the schedule, as a share of lr.")
    critic_warmup_steps: Annotated[NonNegative | None, goes("critic.warmup_steps")] = Field(
        default=None, description="Steps that train the critic alone."
    )
    micro_batch_tokens: Annotated[Positive | None, goes("packing.micro_batch_tokens")] = Field(
        default=None, description="Tokens of one forward pass."
    )
    output_dir: str | Path | None = Field(
        default=None, description="The run folder; none: nothing is written, and nothing can be resumed."
    )
    save_every: Annotated[NonNegative | None, goes("checkpoint.every")] = Field(
        default=None, description="Steps between checkpoints; the end of an epoch always leaves one."
    )
    keep_last: Annotated[Positive | None, goes("checkpoint.keep_last")] = Field(
        default=None, description="Older checkpoints are removed."
    )
    async_save: Annotated[bool | None, goes("checkpoint.async_save")] = Field(
        default=None, description="Write checkpoints in the background."
    )
    seed: NonNegative | None = Field(default=None, description="Seeds sampling, order and initial weights.")
    device: str | None = Field(default=None, description="auto, cpu, cuda, cuda:1 …")
    threads: Positive | None = Field(default=None, description="CPU threads of torch.")

    @model_validator(mode="after")
    def _fits(self) -> TrainingOptions:
        if self.schedule not in (None, "constant") and self.total_epochs is None:
            raise ValueError(f"schedule {self.schedule} needs total_epochs, to know where it ends")
        if self.mini_batch_size is not None and (self.batch_size or 0) % self.mini_batch_size:
            raise ValueError("mini_batch_size must divide batch_size")
        if self.mini_batch_size is not None and self.batch_size is None:
            raise ValueError("mini_batch_size needs batch_size, which it must divide")
        return self


class AlgorithmOptions(Strict):
    """``config["algorithm"]``, as far as the trainers have it in common."""

    loss: Annotated[str | None, goes("loss.name")] = Field(default=None, description="Policy loss, by name.")
    loss_options: Annotated[dict[str, Any] | None, goes("loss.options")] = Field(
        default=None, description="Options of the loss beside the clip ratios."
    )
    clip_ratio: Annotated[NonNegativeFloat | None, goes("loss.options.clip_ratio")] = Field(
        default=None, description="How far the ratio of new to old probability may move, on both sides of 1."
    )
    clip_low: Annotated[NonNegativeFloat | None, goes("loss.options.clip_low")] = Field(
        default=None, description="The same, below 1 alone."
    )
    clip_high: Annotated[NonNegativeFloat | None, goes("loss.options.clip_high")] = Field(
        default=None, description="The same, above 1 alone."
    )
    aggregation: Annotated[str | None, goes("loss.aggregation")] = Field(
        default=None, description="How the tokens of the loss are averaged."
    )
    entropy_coef: Annotated[NonNegativeFloat | None, goes("loss.entropy_coef")] = Field(
        default=None, description="Weight of the entropy bonus."
    )
    kl_coef: Annotated[NonNegativeFloat | None, goes("kl.coef")] = Field(
        default=None, description="Weight of the distance to the starting model."
    )
    kl_ctrl: Literal["fixed", "adaptive"] = Field(
        default="fixed", description="adaptive: the trainer moves kl_coef after every step."
    )
    kl_target: Annotated[PositiveFloat | None, goes("kl.target")] = Field(
        default=None, description=f"Adaptive: the KL that is aimed at; {KL_TARGET} where none is given."
    )
    kl_horizon: Annotated[Positive | None, goes("kl.horizon")] = Field(
        default=None, description="Adaptive: samples over which the coefficient moves."
    )
    kl_where: Annotated[Literal["none", "loss", "reward"], goes("kl.where")] = Field(
        default="loss", description="Where the distance counts. none: it is not even measured."
    )
    kl_estimator: Annotated[
        Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"], goes("kl.estimator")
    ] = Field(default="k3", description="Its estimator.")

    @model_validator(mode="after")
    def _target_is_used(self) -> AlgorithmOptions:
        if self.kl_ctrl == "fixed" and (self.kl_target is not None or self.kl_horizon is not None):
            what = "kl_target and kl_horizon are for kl_ctrl: adaptive"
            raise ValueError(f"{what}; kl_ctrl.update() by hand goes by trainer.kl_ctrl.target and .horizon")
        return self


class PPOAlgorithm(AlgorithmOptions):
    """``config["algorithm"]`` of PPOTrainer."""

    gamma: Annotated[Annotated[float, Field(ge=0, le=1)] | None, goes("advantage.options.gamma")] = Field(
        default=None, description="Discount of the rewards, per token."
    )
    lam: Annotated[Annotated[float, Field(ge=0, le=1)] | None, goes("advantage.options.lam")] = Field(
        default=None, description="Decay of GAE: 0 trusts the critic, 1 the rewards."
    )
    whiten: Annotated[bool | None, goes("advantage.options.whiten")] = Field(
        default=None, description="Whiten the advantages over the batch."
    )
    value_clip: Annotated[PositiveFloat | None, goes("critic.clip_range")] = Field(
        default=None,
        description="How far a value may move from the old one in the critic's loss; None: any way.",
    )
    kl_where: Annotated[Literal["none", "loss", "reward"], goes("kl.where")] = Field(
        default="reward", description="Where the distance counts. none: it is not even measured."
    )
    kl_estimator: Annotated[
        Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"], goes("kl.estimator")
    ] = Field(default="k1", description="Its estimator.")


class GRPOAlgorithm(AlgorithmOptions):
    """``config["algorithm"]`` of GRPOTrainer."""

    estimator: Annotated[str, goes("advantage.name")] = Field(
        default="grpo", description="Advantage estimator that needs no critic, by name."
    )
    estimator_options: Annotated[dict[str, Any] | None, goes("advantage.options")] = Field(
        default=None, description="Its options."
    )


class RolloutOptions(Strict):
    """``config["rollout"]``: the engine and how it samples."""

    name: Annotated[str | None, goes("rollout.name")] = Field(default=None, description="Rollout backend.")
    options: Annotated[dict[str, Any] | None, goes("rollout.options")] = Field(
        default=None, description="Options that this backend alone has."
    )
    n: Annotated[Positive | None, goes("rollout.sampling.n")] = Field(
        default=None, description=f"Answers per prompt; 1 for PPO, {GROUP} for GRPO where none is given."
    )
    temperature: Annotated[NonNegativeFloat | None, goes("rollout.sampling.temperature")] = Field(
        default=None, description="Of the sampling, and of the trained log-probabilities."
    )
    top_p: Annotated[Annotated[float, Field(gt=0, le=1)] | None, goes("rollout.sampling.top_p")] = Field(
        default=None, description="Nucleus; 1 is off."
    )
    top_k: Annotated[NonNegative | None, goes("rollout.sampling.top_k")] = Field(
        default=None, description="Most likely tokens kept; 0 is off."
    )
    max_new_tokens: Annotated[Positive | None, goes("rollout.sampling.max_new_tokens")] = Field(
        default=None, description="Longest answer, tokens, EOS included."
    )
    stop: Annotated[list[str] | None, goes("rollout.sampling.stop")] = Field(
        default=None, description="Strings that end an answer."
    )
    seed: Annotated[int | None, goes("rollout.sampling.seed")] = Field(
        default=None, description="Of the sampling; the training's where none is given."
    )
    memory_share: Annotated[PositiveFloat | None, goes("rollout.resources.memory_share")] = Field(
        default=None, description="Share of the accelerator's memory."
    )
    tensor_parallel_size: Annotated[Positive | None, goes("rollout.resources.tensor_parallel_size")] = Field(
        default=None, description="Devices that one engine spans."
    )
    max_sequences: Annotated[Positive | None, goes("rollout.resources.max_sequences")] = Field(
        default=None, description="Sequences that run at the same time."
    )


class RewardOptions(Strict):
    """``config["reward"]``: how rewards and their dimensions weigh, and how rewards are executed."""

    weights: dict[str, float | dict[str, float]] = Field(
        default_factory=dict,
        description="By the label of the reward; of a single reward_fn also by dimension. A mapping "
        "weighs the dimensions of one reward.",
    )
    execution: Execution = Field(
        default_factory=Execution, description="Executor and limits of every reward: executor, timeout, ..."
    )
    execution_of: dict[str, Execution] = Field(
        default_factory=dict, description="The same for one reward, by its label, in place of `execution`."
    )
    manager: Annotated[str, goes("reward_manager.name")] = Field(
        default="weighted_sum", description="Reward manager, by name."
    )
    manager_options: Annotated[dict[str, Any] | None, goes("reward_manager.options")] = Field(
        default=None, description="Its options."
    )


class DataOptions(Strict):
    """``config["data"]``: which rows, in which order."""

    shuffle: Annotated[bool | None, goes("data.shuffle")] = Field(
        default=None, description="A new order each epoch."
    )
    limit: Annotated[Positive | None, goes("data.limit")] = Field(
        default=None, description="Use the first rows only."
    )
    max_prompt_length: Annotated[Positive | None, goes("max_prompt_length")] = Field(
        default=None, description="Tokens; a longer prompt is refused."
    )


class TrainerOptions(Strict):
    """The whole ``config`` of a trainer."""

    training: TrainingOptions = Field(default_factory=TrainingOptions)
    algorithm: AlgorithmOptions = Field(default_factory=AlgorithmOptions)
    rollout: RolloutOptions = Field(default_factory=RolloutOptions)
    reward: RewardOptions = Field(default_factory=RewardOptions)
    data: DataOptions = Field(default_factory=DataOptions)
    observers: list[PluginRef] | None = Field(
        default=None, description="What sees the metrics; console, and with an output_dir jsonl and rollouts."
    )

    def stage(self) -> dict[str, Any]:
        """The fields of an RL stage that the options set, as plain data. Its steps depend on the data too."""
        stage: dict[str, Any] = {"kind": "rl"}
        for section in (self.training, self.algorithm, self.rollout, self.reward, self.data):
            for path, value in _placed(section):
                _put(stage, path.split("."), value)
        training, algorithm = self.training, self.algorithm
        if training.mini_batch_size is not None and training.batch_size is not None:
            _put(stage, ["batch", "mini_batches"], training.batch_size // training.mini_batch_size)
        if algorithm.kl_ctrl == "adaptive" and algorithm.kl_target is None:
            _put(stage, ["kl", "target"], KL_TARGET)
        return stage

    def run(self, name: str, stage: Mapping[str, Any], output: Path) -> dict[str, Any]:
        """The whole run around ``stage``, as plain data."""
        training, observers = self.training, self.observers
        if observers is None:
            names = ("console", "jsonl", "rollouts") if training.output_dir else ("console",)
            observers = [PluginRef(name=each) for each in names]
        given = {"seed": training.seed, "device": training.device, "threads": training.threads}
        return {
            "name": name,
            "output": str(output),
            "observers": [observer.model_dump() for observer in observers],
            "stages": {name: dict(stage)},
            **{key: value for key, value in given.items() if value is not None},
        }


class PPOOptions(TrainerOptions):
    """The ``config`` of PPOTrainer."""

    algorithm: PPOAlgorithm = Field(default_factory=PPOAlgorithm)

    def stage(self) -> dict[str, Any]:
        """As for every trainer, with GAE."""
        stage = super().stage()
        _put(stage, ["advantage", "name"], "gae")
        return stage


class GRPOOptions(TrainerOptions):
    """The ``config`` of GRPOTrainer. What belongs to a critic is refused."""

    algorithm: GRPOAlgorithm = Field(default_factory=GRPOAlgorithm)

    @model_validator(mode="after")
    def _has_no_critic(self) -> GRPOOptions:
        given = {"critic_lr", "critic_warmup_steps"} & self.training.model_fields_set
        if given:
            raise ValueError(
                f"training.{min(given)} is of a critic, and GRPOTrainer has none; use PPOTrainer"
            )
        return self

    def stage(self) -> dict[str, Any]:
        """As for every trainer, with groups and without a critic."""
        stage = super().stage()
        stage.pop("critic", None)
        if self.rollout.n is None:
            _put(stage, ["rollout", "sampling", "n"], GROUP)
        return stage


def _placed(section: BaseModel) -> Iterator[tuple[str, Any]]:
    """Places and values: of every field that was given, or that has a value of its own by default."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if value is None and name not in section.model_fields_set:
            continue
        for marker in info.metadata:
            if isinstance(marker, Goes):
                yield from ((path, value) for path in marker.paths)


def _put(data: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        data = data.setdefault(key, {})
    old = data.get(keys[-1], {})
    if isinstance(value, Mapping):
        value = {**value, **old}
    data[keys[-1]] = value
