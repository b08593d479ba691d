"""What flows between the parts: plain frozen dataclasses. Importing this module imports no torch.

Outside the trainer a sequence is a tuple of token ids. Inside it, per-token quantities are
packed 1-D tensors over the *response* tokens of a batch (prompt tokens are not in them):
``N`` response tokens of ``S`` sequences, sequence ``i`` at ``cu_seqlens[i]:cu_seqlens[i + 1]``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FinishReason = Literal["stop", "length", "abort"]
Scalar = float | int
Score = float | Mapping[str, float] | None


# --- rollout ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """One prompt to be answered ``Sampling.n`` times."""

    id: str
    prompt_ids: tuple[int, ...]
    seed: int  # sample i of this request draws from (seed, i) alone, whatever shares its batch


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; means the same for every engine."""

    n: int = 1
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    eos_ids: frozenset[int] = frozenset()
    logprobs: bool = True


@dataclass(frozen=True)
class Completion:
    """One answer. An EOS that ended it is its last token."""

    request_id: str
    index: int  # 0 .. n-1
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None  # natural log, of the sampling distribution; one a token
    finish_reason: FinishReason
    weight_version: int


@dataclass(frozen=True)
class Resources:
    """What an engine may take."""

    memory_share: float | None = None  # of the accelerator's memory, 0..1
    tensor_parallel_size: int = 1
    max_sequences: int | None = None  # that run at the same time


@dataclass(frozen=True)
class RolloutContext:
    """What a backend is given at its start."""

    model_path: Path | None  # a Hugging Face folder; None where only the live module exists
    tokenizer: PreTrainedTokenizerBase | None
    dtype: str  # "float32", "bfloat16", ...
    device: str
    seed: int
    max_length: int  # prompt + response, tokens
    resources: Resources = field(default_factory=Resources)
    live_model: PreTrainedModel | None = None  # the trainer's own module, for backends in its process


@dataclass(frozen=True)
class BackendInfo:
    """What a started backend can do."""

    name: str
    sleep: bool = False
    lora: bool = False
    logprobs: Literal["none", "raw", "processed"] = "processed"
    server: bool = False
    shares_weights: bool = False  # generates from the trainer's own module
    details: Mapping[str, str] = field(default_factory=dict)


# --- rewards ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """What a reward judges."""

    id: str
    group: Hashable
    prompt: str
    response: str
    reference: str | list[str] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    completion: Completion | None = None
    origin: str = ""  # file and row of the prompt, where they are known

    @property
    def name(self) -> str:
        """The id, and where its prompt comes from: what a message calls it."""
        return f"{self.id} ({self.origin})" if self.origin else self.id


@dataclass(frozen=True)
class Needs:
    """What a reward requires of the data and the machine; checked before a model loads."""

    columns: tuple[str, ...] = ()
    reference: bool = False
    device: bool = False
    each: bool = False  # judges every sample by itself: samples may be given in parts, and side by side
    reads: tuple[str, ...] | None = None  # with each: the columns that can matter, beside the text; None: all
    asynchronous: bool = False  # reward_score returns an awaitable
    isolated: bool = False  # only in a worker process, which can be killed and limited


@dataclass(frozen=True)
class Reward:
    """A sample's reward after the manager. ``value`` None: unscorable, the sample is masked."""

    value: float | None
    per_token: tuple[float, ...] | None = None  # one a response token; sums to value
    dims: Mapping[str, float] = field(default_factory=dict)


# --- algorithms ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """Where the sequences of a packed batch lie."""

    cu_seqlens: torch.Tensor  # int32 [S + 1]
    mask: torch.Tensor  # bool [N]; False where a token was not the policy's (tool output)
    group: tuple[Hashable, ...]  # S


@dataclass(frozen=True)
class Totals:
    """Global counts: over all micro-batches of the optimiser step and all ranks."""

    tokens: int  # response tokens with mask
    sequences: int  # sequences with at least one such token
    max_length: int = 0  # longest response, tokens (incl. masked); T of the "norm" aggregation


Reduce = Callable[["torch.Tensor"], "torch.Tensor"]
"""Sums a float64 tensor over ranks; the identity with one rank."""


@dataclass(frozen=True)
class AdvantageBatch:
    """Input of an advantage estimator. Groups are never split over ranks."""

    packed: Packed
    token_rewards: torch.Tensor  # float64 [N]; 0 where not mask
    scores: torch.Tensor  # float64 [S]; NaN: unscorable
    dims: Mapping[str, torch.Tensor]  # float64 [S] each, by dimension
    values: torch.Tensor | None  # float32 [N], of the critic
    baselines: torch.Tensor | None  # float64 [S], score of the greedy answer
    reduce: Reduce


@dataclass(frozen=True)
class Advantages:
    """Output of an advantage estimator."""

    advantages: torch.Tensor  # float32 [N]; 0 where not mask, and for unscorable samples
    returns: torch.Tensor | None = None  # float32 [N]; what the critic learns
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Traits:
    """What an advantage estimator needs."""

    needs_critic: bool = False
    needs_groups: bool = False
    needs_greedy_baseline: bool = False
    scope: Literal["sequence", "group", "batch"] = "group"  # over what its statistics range


@dataclass(frozen=True)
class LossBatch:
    """Input of a policy loss: float32 [N] each."""

    packed: Packed
    logp: torch.Tensor  # with gradient
    old_logp: torch.Tensor
    rollout_logp: torch.Tensor | None
    advantages: torch.Tensor


@dataclass(frozen=True)
class TokenLoss:
    """Output of a policy loss. The reduction is core's, never the plugin's."""

    loss: torch.Tensor  # float32 [N], unreduced
    metrics: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # (sum, count)


@dataclass(frozen=True)
class LossTraits:
    """What a policy loss is."""

    ratio: Literal["token", "sequence"] = "token"
    aggregation: str = "token_mean"  # used where the config names none
    advantage_only: bool = True  # a sequence of advantage 0 has no loss and no gradient: it may be left out


# --- data ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Location:
    """Where a row came from. ``row`` counts from 1; for JSONL it is the physical line."""

    file: str
    row: int


@dataclass(frozen=True)
class SourceRow:
    """A raw row of a source file."""

    location: Location
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """A converted row: text by role, and the columns that go along."""

    location: Location
    prompt: str | None = None
    response: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    text: str | None = None
    reference: str | list[str] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BadRow:
    """A row that could not be converted, and why."""

    location: Location
    reason: str


@dataclass(frozen=True)
class Roles:
    """The roles that a converter reads; used to infer the converter from a mapping.

    ``columns`` names, by role, the columns that have it without being mapped, the first that exists;
    for a role that is not in it the usual names hold.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


# --- export, observers -----------------------------------------------------------------------


@dataclass(frozen=True)
class ExportReport:
    """What an exporter wrote."""

    files: tuple[str, ...]
    parameters: int
    dtype: str


@dataclass(frozen=True)
class Verification:
    """What reading an export back showed."""

    max_abs_logit_difference: float
    tolerance: float
    checked_tokens: int = 0

    @property
    def passed(self) -> bool:
        return self.max_abs_logit_difference <= self.tolerance  # NaN fails


@dataclass(frozen=True)
class RunInfo:
    """What observers learn when a stage begins."""

    folder: Path
    name: str
    stage: str
    kind: str
    total_steps: int | None
    first_step: int  # 0, or the step of the checkpoint that is resumed
    config: Mapping[str, Any]  # the resolved configuration, as plain data
    first_global_step: int | None = (
        None  # steps of the whole run before; what lies after is stale. None: keep all
    )


@dataclass(frozen=True)
class Outcome:
    """How a stage ended."""

    stage: str
    status: Literal["finished", "interrupted", "failed"]
    steps: int
    message: str = ""


Metrics = Mapping[str, Scalar]
Rows = Sequence[SourceRow]
