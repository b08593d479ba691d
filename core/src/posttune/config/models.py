"""The schema of a configuration: what core knows without importing any plugin.

Every model forbids unknown keys. Values are strict: ``"1"`` is no integer, an integer is a number.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from posttune.config.base import Fraction as Fraction
from posttune.config.base import NonNegative as NonNegative
from posttune.config.base import NonNegativeFloat as NonNegativeFloat
from posttune.config.base import PluginRef as PluginRef
from posttune.config.base import Positive as Positive
from posttune.config.base import PositiveFloat as PositiveFloat
from posttune.config.base import RewardRef as RewardRef
from posttune.config.base import Strict as Strict
from posttune.config.base import Told as Told
from posttune.config.checkpoints import CheckpointConfig as CheckpointConfig
from posttune.config.memory import MemoryConfig as MemoryConfig
from posttune.config.memory import OptimizerConfig as OptimizerConfig
from posttune.config.parallel import ParallelConfig as ParallelConfig
from posttune.config.rl import AlarmsConfig as AlarmsConfig
from posttune.config.rl import DynamicSamplingConfig as DynamicSamplingConfig
from posttune.config.rl import KLConfig as KLConfig
from posttune.config.rl import LossConfig as LossConfig
from posttune.config.rl import MismatchConfig as MismatchConfig
from posttune.config.rl import RlBatchConfig as RlBatchConfig

DType = Literal["float32", "bfloat16", "float16"]


def _text_or_mapping(value: object) -> str:
    return "<mapping>" if isinstance(value, dict | BaseModel) else "<text or a mapping>"


def _text_or_list(value: object) -> str:
    return "<list>" if isinstance(value, list) else "<text or a list>"


# Tags make an error come from one branch alone. Those in angle brackets are dropped from its path.
TextOrList = Annotated[
    Annotated[str, Tag("<text or a list>")] | Annotated[list[str], Tag("<list>")],
    Discriminator(_text_or_list),
]


class SamplingConfig(Strict):
    """How tokens are drawn; means the same for every engine."""

    n: Positive = Field(default=1, description="Completions per prompt.")
    temperature: NonNegativeFloat = Field(default=1.0, description="0 is greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0, description="Nucleus; 1 is off.")
    top_k: NonNegative = Field(default=0, description="Most likely tokens kept; 0 is off.")
    max_new_tokens: Positive = Field(default=256, description="Longest completion, tokens, EOS included.")
    stop: list[str] = Field(default_factory=list, description="Strings that end a completion.")
    seed: int | None = Field(default=None, description="Defaults to the run's seed.")


class GreedySamplingConfig(SamplingConfig):
    """Sampling of an evaluation: greedy unless it says otherwise."""

    temperature: NonNegativeFloat = Field(default=0.0, description="0 is greedy.")


class ResourcesConfig(Strict):
    """What an engine may take; means the same for every engine."""

    memory_share: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="Share of the accelerator's memory."
    )
    tensor_parallel_size: Positive = Field(default=1, description="Devices that one engine spans.")
    max_sequences: Positive | None = Field(default=None, description="Sequences that run at the same time.")


class RolloutConfig(PluginRef):
    """The engine and how it samples."""

    name: str = Field(default="hf", description="Rollout backend.")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    resources: ResourcesConfig = Field(default_factory=ResourcesConfig)


class EvaluationRolloutConfig(RolloutConfig):
    """The engine of an evaluation."""

    sampling: GreedySamplingConfig = Field(default_factory=GreedySamplingConfig)


class LoraConfig(Strict):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685), by peft."""

    rank: Positive = Field(default=16, description="Rank of the update.")
    alpha: PositiveFloat = Field(default=32.0, description="Scale; the update is multiplied by alpha / rank.")
    dropout: Fraction = Field(default=0.0, description="Dropout on the adapter's input.")
    target_modules: TextOrList = Field(default="all-linear", description="Module names, or all-linear.")


class ModelConfig(Strict):
    """A model: an existing folder (or an earlier stage), or a new one from a configuration."""

    path: str | None = Field(
        default=None, description="Hugging Face folder, checkpoint, or an earlier stage."
    )
    init: dict[str, Any] | None = Field(
        default=None,
        description="Make a new model: fields of a transformers configuration, model_type among them.",
    )
    tokenizer: str | None = Field(
        default=None, description='Tokenizer folder; "bytes" is a new byte-level one. Defaults to the path.'
    )
    dtype: DType = Field(default="float32", description="Type of the weights while training.")
    attention: Literal["auto", "flash", "sdpa", "eager", "flex"] = Field(
        default="auto",
        description="Attention implementation. What the device cannot run is replaced by sdpa.",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass."
    )
    lora: LoraConfig | None = Field(default=None, description="Train adapters only.")


ModelRef = Annotated[
    Annotated[str, Tag("<text or a mapping>")] | Annotated[ModelConfig, Tag("<mapping>")],
    Discriminator(_text_or_mapping),
]


class DataConfig(Strict):
    """A converted dataset: a folder, or an earlier convert stage."""

    path: str = Field(description="Dataset folder, or the name of an earlier convert stage.")
    limit: Positive | None = Field(default=None, description="Use the first rows only.")
    shuffle: bool = Field(default=True, description="A new order each epoch, from the run's seed.")
    max_length: Positive | None = Field(
        default=None, description="Tokens of a whole sequence; longer rows fail the run (see truncation)."
    )
    truncation: Literal["refuse", "left", "right", "middle"] = Field(
        default="refuse", description="What happens to a longer row."
    )


DataRef = Annotated[
    Annotated[str, Tag("<text or a mapping>")] | Annotated[DataConfig, Tag("<mapping>")],
    Discriminator(_text_or_mapping),
]


class PackingConfig(Strict):
    """How sequences share rows and rows share a forward pass."""

    micro_batch_tokens: Positive = Field(default=8192, description="Tokens of one forward pass.")
    row_tokens: Positive | None = Field(
        default=None,
        description="Length of a row of packed sequences; chosen from the lengths where none is given.",
    )


class StopConfig(Strict):
    """Ends a stage early once a validation metric has been reached."""

    metric: str = Field(description="A metric of the validation, such as val/accuracy.")
    at_least: float = Field(description="The stage ends once the metric is this high.")


class ValidationConfig(Strict):
    """An evaluation in the middle of training."""

    every: Positive = Field(description="Steps between evaluations.")
    data: DataRef = Field(description="Dataset folder, or an earlier convert stage.")
    rewards: list[RewardRef] = Field(
        min_length=1, description="What judges the answers; the first decides accuracy."
    )
    sampling: GreedySamplingConfig = Field(default_factory=GreedySamplingConfig)
    stop: StopConfig | None = Field(default=None, description="End the stage early.")


class HoldoutConfig(Strict):
    """Pairs that are not trained on: a share of the data, or other data."""

    every: Positive | None = Field(
        default=None, description="Steps between evaluations; the last step always has one."
    )
    fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.1, description="Share of the rows, split off by prompt; 0: none."
    )
    data: DataRef | None = Field(
        default=None, description="Another dataset, or an earlier convert stage, instead of a share."
    )


class CriticConfig(Strict):
    """The model that learns the values of states, for estimators that need one (PPO)."""

    model: ModelRef | None = Field(
        default=None, description="A language model or a reward model; defaults to the stage's own model."
    )
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    warmup_steps: NonNegative = Field(
        default=0, description="First steps, in which the critic alone learns; the policy stays."
    )
    clip_range: PositiveFloat | None = Field(
        default=0.2, description="How far a value may move from the old one; none: no clipping."
    )
    mini_batches: Positive | None = Field(default=None, description="Defaults to the policy's.")
    epochs: Positive | None = Field(default=None, description="Defaults to the policy's.")


class Stage(Strict):
    """Common to all stages."""

    kind: str


class ConvertStage(Stage):
    """Reads source files into a dataset folder."""

    kind: Literal["convert"] = "convert"
    source: TextOrList = Field(description="Files to read: JSONL or Parquet.")
    to: str | None = Field(
        default=None, description="Dataset folder; defaults to data/<stage> of the run folder."
    )
    converter: PluginRef | None = Field(
        default=None, description="Inferred from the roles where none is named."
    )
    map: dict[str, str] = Field(default_factory=dict, description="Role to column, as a dotted path.")
    tokenizer: str | None = Field(
        default=None, description="Tokenizer folder; none: tokenised when training begins."
    )
    template: str = Field(default="auto", description="auto, none, or the path of a chat template.")
    on_bad_row: Literal["refuse", "skip"] = Field(default="refuse", description="What a bad row does.")
    max_length: Positive | None = Field(default=None, description="Tokens of a whole sequence.")
    truncation: Literal["refuse", "left", "right", "middle"] = Field(
        default="refuse", description="What happens to a longer row."
    )
    overwrite: bool = Field(default=False, description="Replace another dataset at the same place.")


class SftStage(Stage):
    """Supervised fine-tuning: cross-entropy on the response and its EOS."""

    kind: Literal["sft"] = "sft"
    model: ModelRef
    data: DataRef
    batch_size: Positive = Field(default=32, description="Sequences per step, over all ranks.")
    steps: Positive | None = Field(default=None, description="Optimiser steps; or give epochs.")
    epochs: PositiveFloat | None = Field(default=None, description="Passes over the data; or give steps.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    packing: PackingConfig = Field(default_factory=PackingConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    evaluate: ValidationConfig | None = None


class RewardModelStage(Stage):
    """Fits a scalar head to preferences: the chosen answer shall score higher than the rejected one."""

    kind: Literal["reward_model"] = "reward_model"
    model: ModelRef
    data: DataRef
    batch_size: Positive = Field(default=32, description="Pairs per step, over all ranks.")
    steps: Positive | None = Field(default=None, description="Optimiser steps; or give epochs.")
    epochs: PositiveFloat | None = Field(default=None, description="Passes over the data; or give steps.")
    holdout: HoldoutConfig = Field(default_factory=HoldoutConfig, description="What is not trained on.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    packing: PackingConfig = Field(default_factory=PackingConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)


class RlStage(Stage):
    """Reinforcement learning on completions of the model itself."""

    kind: Literal["rl"] = "rl"
    model: ModelRef
    data: DataRef
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    rewards: list[RewardRef] = Field(min_length=1)
    reward_manager: PluginRef = Field(default_factory=lambda: PluginRef(name="weighted_sum"))
    advantage: PluginRef = Field(default_factory=lambda: PluginRef(name="grpo"))
    loss: LossConfig = Field(default_factory=LossConfig)
    kl: KLConfig = Field(default_factory=KLConfig)
    critic: CriticConfig | None = Field(default=None, description="For estimators that need one, as gae.")
    mismatch: MismatchConfig = Field(default_factory=MismatchConfig)
    batch: RlBatchConfig = Field(default_factory=RlBatchConfig)
    dynamic_sampling: DynamicSamplingConfig | None = Field(
        default=None, description="Refill a step in which prompts had to be dropped."
    )
    alarms: AlarmsConfig = Field(default_factory=AlarmsConfig)
    max_prompt_length: Positive | None = Field(
        default=None, description="Tokens; a longer prompt fails the run."
    )
    steps: Positive | None = Field(
        default=None, description="Steps (a rollout and its updates); or give epochs."
    )
    epochs: PositiveFloat | None = Field(default=None, description="Passes over the prompts; or give steps.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    packing: PackingConfig = Field(default_factory=PackingConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    evaluate: ValidationConfig | None = None


class EvaluateStage(Stage):
    """Answers prompts and reports accuracy with a confidence interval."""

    kind: Literal["evaluate"] = "evaluate"
    model: ModelRef
    data: DataRef
    rewards: list[RewardRef] = Field(min_length=1, description="The first decides accuracy.")
    rollout: EvaluationRolloutConfig = Field(default_factory=EvaluationRolloutConfig)
    by: list[str] = Field(default_factory=list, description="Columns to break the accuracy down by.")


class ExportStage(Stage):
    """Writes a Hugging Face folder and reads it back."""

    kind: Literal["export"] = "export"
    model: str = Field(description="An earlier stage, a checkpoint, or a Hugging Face folder.")
    to: str | None = Field(default=None, description="Defaults to export of the run folder.")
    base: str | None = Field(default=None, description="The model of adapters; where no file names it.")
    part: str | None = Field(default=None, description="A checkpoint's other model, such as critic.")
    exporter: PluginRef = Field(default_factory=lambda: PluginRef(name="hf"))
    dtype: Literal["keep", "float32", "bfloat16", "float16"] = Field(
        default="keep", description="Type of the weights that are written; keep: that of the source."
    )


STAGES: dict[str, type[Stage]] = {
    "convert": ConvertStage,
    "sft": SftStage,
    "reward_model": RewardModelStage,
    "rl": RlStage,
    "evaluate": EvaluateStage,
    "export": ExportStage,
}

AnyStage = Annotated[
    ConvertStage | SftStage | RewardModelStage | RlStage | EvaluateStage | ExportStage,
    Field(discriminator="kind"),
]


class RunConfig(Told):
    """A whole run. ``stages`` runs in order."""

    name: str = Field(default="run", description="Name of the run.")
    output: str = Field(description="The run folder.")
    seed: NonNegative = Field(default=0, description="Seeds sampling, order and initial weights.")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1 …")
    threads: Positive | None = Field(
        default=None, description="CPU threads of torch; its own choice where none."
    )
    parallel: ParallelConfig = Field(
        default_factory=ParallelConfig, description="How models lie on several processes."
    )
    observers: list[PluginRef] = Field(
        default_factory=lambda: [
            PluginRef(name="console"),
            PluginRef(name="jsonl"),
            PluginRef(name="rollouts"),
        ]
    )
    stages: dict[str, AnyStage] = Field(min_length=1)
