"""The loop that every training stage runs: step, validate, report, save, stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from posttune.errors import Interrupted, RunError

if TYPE_CHECKING:
    import pyarrow as pa

    from posttune.config.checkpoints import BestConfig
    from posttune.distributed.ranks import Ranks
    from posttune.facade import Observers
    from posttune.run.interrupt import InterruptFlag

MAX_NONFINITE = 3


@dataclass(frozen=True)
class Position:
    """Where a stage is. Everything that is drawn at random or in order follows from it and the seed."""

    step: int = 0  # steps of this stage that are done
    base: int = 0  # steps of earlier stages of the run
    consumed: int = 0  # rows of the data stream that are used up, over all ranks and epochs
    stopped: bool = False  # the validation has ended the stage
    best: Mapping[str, float] = field(default_factory=dict)  # the metric to keep the best by: its best value
    best_step: int = 0  # the global step at which it was that good

    @property
    def global_step(self) -> int:
        """Steps of the whole run that are done."""
        return self.base + self.step

    def after(self, rows: int) -> Position:
        """The position one step and ``rows`` rows later."""
        return replace(self, step=self.step + 1, consumed=self.consumed + rows)


@dataclass(frozen=True)
class StepOutput:
    """What a step leaves for the observers: global metrics, and on rank 0 its samples, if it has any."""

    metrics: dict[str, float]
    rows: int  # of the data stream, over all ranks
    samples: pa.Table | None = None  # on rank 0
    stop: str | None = None  # why the stage should not go on


class Work(Protocol):
    """What one kind of stage does in a step."""

    def step(self, position: Position) -> StepOutput:
        """Take the step that begins at ``position``."""

    def nonfinite_in_a_row(self) -> int:
        """Optimiser steps skipped since the last that was taken."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold besides model, optimiser and position. JSON."""


class Check(Protocol):
    """What is looked at every so many steps: a validation, or pairs that were held out."""

    def due(self, step: int) -> bool:
        """Whether it follows step ``step`` (from 1)."""

    def run(self) -> dict[str, float]:
        """``val/*`` of the present weights."""

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Whether the stage may end."""


@dataclass
class Loop:
    """Runs ``work`` from ``position`` to the end of its stage. Leaves a checkpoint."""

    stage: str
    work: Work
    total_steps: int
    save: Callable[[Position], Path | None]
    save_every: int
    validation: Check | None
    observers: Observers
    interrupt: InterruptFlag
    ranks: Ranks
    position: Position  # where the loop is
    keep_best: BestConfig | None = None  # a metric of the validation
    written: Callable[[bool], Sequence[Path]] | None = None  # see `Checkpoints.written`; None: `save` waits

    @property
    def done(self) -> bool:
        """Whether the stage is at its end."""
        return self.position.step >= self.total_steps or self.position.stopped

    def run(self) -> Mapping[str, float]:
        """Train until the last step, or until the validation or the user ends it. The last metrics."""
        metrics: Mapping[str, float] = {}
        while not self.done:
            output = self.work.step(self.position)
            self.position = self.position.after(output.rows)
            metrics = output.metrics | self._validate()
            self._stop_early(metrics)
            best = self._note_best(metrics)
            self._report(metrics, output)
            self._save_and_stop(best, output.stop)
        return metrics

    def _validate(self) -> dict[str, float]:
        if self.validation is None or not self.validation.due(self.position.step):
            return {}
        return self.ranks.broadcast_object(self.validation.run())

    def _stop_early(self, metrics: Mapping[str, float]) -> None:
        if self.validation is not None and self.validation.reached(metrics):
            self.position = replace(self.position, stopped=True)

    def _note_best(self, metrics: Mapping[str, float]) -> bool:
        """Whether the validation has never been better."""
        wanted = self.keep_best
        value = metrics.get(wanted.metric) if wanted else None
        if wanted is None or value is None:
            return False
        if not wanted.better(value, self.position.best.get(wanted.metric)):
            return False
        best = {wanted.metric: value}
        self.position = replace(self.position, best=best, best_step=self.position.global_step)
        return True

    def _report(self, metrics: Mapping[str, float], output: StepOutput) -> None:
        if not self.ranks.main:
            return
        step, global_step = self.position.step, self.position.global_step
        self.observers.step(self.stage, step, {"global_step": global_step, **metrics})
        if output.samples is not None:
            self.observers.samples(self.stage, step, output.samples)

    def _save_and_stop(self, best: bool, stop: str | None) -> None:
        """Save where it is due, and raise where the stage cannot or should not go on."""
        step = self.position.step
        interrupted = self.ranks.any(bool(self.interrupt))
        diverged = self.work.nonfinite_in_a_row() >= MAX_NONFINITE
        due = best or (self.save_every > 0 and step % self.save_every == 0)
        if not (due or self.done or interrupted or diverged or stop):
            self._tell_of_written(wait=False)
            return
        path = self.save(self.position)
        ends = self.done or interrupted or diverged or stop is not None
        self._tell_of_written(wait=ends, saved=path)
        kept = f"in {path}" if path is not None else "in memory alone"
        if diverged:
            raise RunError(
                f"the loss or its gradient was not finite in {MAX_NONFINITE} steps in a row",
                who=f"stage {self.stage!r}, step {step}",
                fix=f"lower the learning rate or the clipping; the last finite weights are {kept}",
            )
        if stop:
            fix = f"look into its samples and metrics; on_alarm: warn goes on. The weights are {kept}"
            raise RunError(stop, who=f"stage {self.stage!r}, step {step}", fix=fix)
        if interrupted:
            raise Interrupted(
                f"stopped after step {step} of {self.total_steps}; checkpoint: {path}",
                who=f"stage {self.stage!r}",
                fix="run the same command with --resume to go on",
            )

    def _tell_of_written(self, *, wait: bool, saved: Path | None = None) -> None:
        """Tell the observers of the checkpoints that are complete; ``wait`` until all are."""
        told: Sequence[Path] = [] if saved is None else [saved]
        paths = told if self.written is None else self.written(wait)
        for path in paths if self.ranks.main else ():
            self.observers.checkpoint(path, int(path.name.rpartition("_")[2]))
