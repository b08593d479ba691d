"""The observers of a run: each is guarded, so that none can end the training."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posttune.errors import PosttuneError
from posttune.pipeline import Member
from posttune.types import Metrics, Outcome, RunInfo

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("posttune.observers")


class Observers:
    """The observers, called in order. One that raises is logged once and called no more.

    ``disabled`` holds the reason by label.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = tuple(members)
        self.disabled: dict[str, str] = {}

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels, in the order of the configuration."""
        return tuple(member.label for member in self._members)

    def wants(self, hook: str) -> bool:
        """Whether any working observer has this hook, such as ``observer_samples``."""
        return any(member.implements(hook) for member in self._working())

    def run_start(self, run: RunInfo) -> None:
        """A stage begins."""
        self._tell("observer_run_start", run=run)

    def step(self, stage: str, step: int, metrics: Metrics) -> None:
        """A step ended; metrics are global."""
        self._tell("observer_step", stage=stage, step=step, metrics=metrics)

    def samples(self, stage: str, step: int, table: pa.Table) -> None:
        """The samples of a step."""
        self._tell("observer_samples", stage=stage, step=step, table=table)

    def checkpoint(self, path: Path, step: int) -> None:
        """A checkpoint is complete."""
        self._tell("observer_checkpoint", path=path, step=step)

    def run_end(self, outcome: Outcome) -> None:
        """A stage ended; to be called also after a failure."""
        self._tell("observer_run_end", outcome=outcome)

    def _working(self) -> list[Member]:
        return [member for member in self._members if member.label not in self.disabled]

    def _tell(self, hook: str, **arguments: object) -> None:
        for member in self._working():
            try:
                member.call(hook, **arguments)
            except PosttuneError as error:
                self.disabled[member.label] = str(error)
                log.exception("observer %r is switched off: %s", member.label, error)
