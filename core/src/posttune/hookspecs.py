"""What a plugin of each kind must do. Importing this module imports no torch.

A plugin is a class: a ``Config`` (pydantic, ``extra="forbid"``), an ``__init__(config)`` that does
no work, and methods marked ``@hookimpl``. Hooks are called with keywords; an implementation may
take the subset of the arguments that it needs. The bodies raise because a specification is never called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pluggy

from posttune.types import (
    AdvantageBatch,
    Advantages,
    BackendInfo,
    BadRow,
    Completion,
    ExportReport,
    LossBatch,
    LossTraits,
    Metrics,
    Needs,
    Outcome,
    Record,
    Request,
    Reward,
    Roles,
    RolloutContext,
    RunInfo,
    Sample,
    Sampling,
    Score,
    SourceRow,
    TokenLoss,
    Traits,
    Verification,
)

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

    from posttune.checkpoint.sources import ModelSource

PROJECT = "posttune"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class RolloutBackendSpec:
    """An engine that generates. Its state machine is the facade's: a backend need not guard it."""

    @hookspec(firstresult=True)
    def rollout_backend_start(self, context: RolloutContext) -> BackendInfo:
        """Start the engine."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def rollout_backend_generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Answer every request ``sampling.n`` times: ``len(requests) * n`` completions, request-major."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def rollout_backend_load_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, adapter: str | None
    ) -> bool:
        """Take new weights, by Hugging Face name: all of them, or raise. Drops caches. Returns True."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def rollout_backend_checksums(self) -> dict[str, str]:
        """SHA-256 of each tensor's bytes by Hugging Face name, fused ones split. Optional."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def rollout_backend_sleep(self) -> bool:
        """Free the accelerator's memory. Optional; returns True."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def rollout_backend_wake(self, part: Literal["weights", "cache"]) -> bool:
        """Take memory again: "weights", then load_weights, then "cache". Optional; returns True."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def rollout_backend_stop(self) -> bool:
        """Stop the engine; may be called twice. Returns True."""
        raise NotImplementedError


class AdvantageEstimatorSpec:
    """Turns the rewards of a batch into advantages."""

    @hookspec(firstresult=True)
    def advantage_estimator_traits(self) -> Traits:
        """What the estimator needs."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def advantage_estimator_compute(self, batch: AdvantageBatch) -> Advantages:
        """Advantages of every response token: float32 [N], 0 where not mask."""
        raise NotImplementedError


class PolicyLossSpec:
    """The loss of each response token."""

    @hookspec(firstresult=True)
    def policy_loss_traits(self) -> LossTraits:
        """What the loss is."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def policy_loss_compute(self, batch: LossBatch) -> TokenLoss:
        """Loss of each response token: float32 [N], unreduced."""
        raise NotImplementedError


class RewardSpec:
    """Scores samples. One instance per call, perhaps in a worker process."""

    @hookspec
    def reward_needs(self) -> Needs:
        """What the reward requires; checked before a model loads. Optional."""
        raise NotImplementedError

    @hookspec
    def reward_score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """One number, dict of dimensions, or None (unscorable) per sample, in order. May be async."""
        raise NotImplementedError


class RewardManagerSpec:
    """Combines the scores of each sample."""

    @hookspec(firstresult=True)
    def reward_manager_combine(
        self, samples: Sequence[Sample], scores: Mapping[str, Sequence[Score]]
    ) -> list[Reward]:
        """One reward per sample, in order. ``scores`` by label of the reward."""
        raise NotImplementedError


class DataConverterSpec:
    """Reads the rows of one data format. Reading files and compression is core's."""

    @hookspec(firstresult=True)
    def data_converter_roles(self) -> Roles:
        """The roles that it reads."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def data_converter_convert(
        self, rows: Iterable[SourceRow], columns: Mapping[str, str]
    ) -> Iterator[Record | BadRow]:
        """At least one record or bad row per row, with its location. ``columns``: role to dotted path."""
        raise NotImplementedError


class CheckpointExporterSpec:
    """Writes a trained model. ``destination`` is temporary; core renames it after the verification."""

    @hookspec(firstresult=True)
    def checkpoint_exporter_export(self, source: ModelSource, destination: Path, dtype: str) -> ExportReport:
        """Write the model; ``dtype`` is "keep" or a torch name."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def checkpoint_exporter_verify(self, source: ModelSource, destination: Path) -> Verification:
        """Load what was written and compare its logits with the source's."""
        raise NotImplementedError


class ObserverSpec:
    """Sees a run. Each instance is guarded: an error disables it and is logged. Rank 0 only."""

    @hookspec
    def observer_run_start(self, run: RunInfo) -> None:
        """A stage begins."""

    @hookspec
    def observer_step(self, stage: str, step: int, metrics: Metrics) -> None:
        """A step ended; metrics are global."""

    @hookspec
    def observer_samples(self, stage: str, step: int, table: pa.Table) -> None:
        """The samples of a step."""

    @hookspec
    def observer_checkpoint(self, path: Path, step: int) -> None:
        """A checkpoint is complete."""

    @hookspec
    def observer_run_end(self, outcome: Outcome) -> None:
        """A stage ended; called also after a failure."""
