"""Runs the stages of a configuration in order, and remembers what was done."""

from __future__ import annotations

import faulthandler
import importlib
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from posttune.config.load import LoadedConfig
from posttune.config.models import Stage
from posttune.errors import Interrupted, PosttuneError
from posttune.files import atomic_write_text
from posttune.run.environment import write_environment
from posttune.run.folder import RunFolder, StageMarker, StageStatus
from posttune.run.resume import Step, digest, make_plan, stage_settings
from posttune.run.reward_models import with_outputs
from posttune.run.stages import InterruptFlag, StageContext, StageResult

if TYPE_CHECKING:
    from posttune.distributed.ranks import Ranks
    from posttune.facade import Observers

T = TypeVar("T")
StageFunction = Callable[[Any, StageContext], StageResult]

FUNCTIONS = {
    "convert": "posttune.data.stage:run_convert",
    "sft": "posttune.trainer.sft:run_sft",
    "reward_model": "posttune.trainer.reward_model:run_reward_model",
    "rl": "posttune.trainer.rl:run_rl",
    "evaluate": "posttune.evaluate.stage:run_evaluate",
    "export": "posttune.checkpoint.stage:run_export",
}
ALONE = frozenset({"convert", "evaluate", "export"})
"""Kinds of stage that rank 0 runs while the other ranks wait for its result."""


def run(loaded: LoadedConfig, resume: bool = False) -> list[StageResult]:
    """Run every stage that is not finished. Returns one result per stage, in order.

    Raises UserError for a folder that holds another run, ConfigError for what the checks before
    a run find, Interrupted after Ctrl-C, and whatever a stage raises.
    """
    from posttune.distributed.ranks import Ranks
    from posttune.reward.loading import also_look_in

    also_look_in(loaded.folder)
    folder = RunFolder(loaded.config.output)
    ranks = Ranks.current(loaded.config.device, parallel=loaded.config.parallel)
    _register_stack_dump()
    try:
        with InterruptFlag().installed() as interrupt, ExitStack() as held:
            results = _Run(loaded, folder, ranks, interrupt, resume).all(held)
    except Interrupted:
        ranks.close()
        raise
    ranks.close()  # not after an error: the others may be gone, and the end of the process does it too
    return results


class _Run:
    """One run of one process."""

    def __init__(
        self,
        loaded: LoadedConfig,
        folder: RunFolder,
        ranks: Ranks,
        interrupt: InterruptFlag,
        resume: bool,
    ) -> None:
        self.loaded, self.config = loaded, loaded.config
        self.folder, self.ranks, self.interrupt = folder, ranks, interrupt
        self.resume = resume
        self.outputs: dict[str, Path] = {}

    def all(self, held: ExitStack) -> list[StageResult]:
        """Check, prepare, then one stage after the other. ``held`` keeps the folder's lock."""
        plan = self._on_main(lambda: self._prepare(held))
        observers = self._observers()
        self._set_threads()
        return [self._one(step, observers) for step in plan]

    def _prepare(self, held: ExitStack) -> list[Step]:
        from posttune.run.dry_run import check_run

        plan = make_plan(self.config, self.folder, self.resume)
        check_run(self.loaded, self.folder, plan, self.ranks.data_world).raise_problems()
        held.enter_context(self.folder.locked())
        atomic_write_text(self.folder.resolved, self.loaded.to_yaml())
        write_environment(self.folder.environment, self.loaded.plain(), sys.argv)
        return plan

    def _observers(self) -> Observers:
        from posttune.facade import build_observers

        return build_observers(self.config.observers if self.ranks.main else [])

    def _set_threads(self) -> None:
        if self.config.threads is not None:
            import torch

            torch.set_num_threads(self.config.threads)

    def _one(self, step: Step, observers: Observers) -> StageResult:
        if step.action == "skip" and step.marker is not None:
            result = self._remembered(step.marker)
        else:
            self._stop_if_asked()
            result = self._run_stage(step, observers)
        if result.output is not None:
            self.outputs[step.name] = result.output
        return result

    def _run_stage(self, step: Step, observers: Observers) -> StageResult:
        stage = self.config.stages[step.name]
        marker = self._marker(step, stage)
        context = StageContext(
            run=self.config,
            name=step.name,
            folder=self.folder,
            observers=observers,
            resume=step.action == "continue",
            outputs=dict(self.outputs),
            interrupt=self.interrupt,
            ranks=self.ranks,
        )
        self._remember(step.name, marker)
        began = time.perf_counter()
        status: StageStatus = "failed"
        result = StageResult(None)
        try:
            result = self._call(with_outputs(stage, self.outputs), context)
            status = "finished"
        except (Interrupted, KeyboardInterrupt):
            status = "interrupted"
            raise
        finally:
            seconds = marker.seconds + time.perf_counter() - began
            result = replace(result, seconds=seconds)
            self._remember(step.name, self._ended(marker, status, result))
        return result

    def _call(self, stage: Stage, context: StageContext) -> StageResult:
        from posttune.distributed import watch

        function = stage_function(stage.kind)
        if stage.kind in ALONE:
            with watch.stage(context.name):
                return self._on_main(lambda: function(stage, context))
        else:
            from posttune.memory.oom import explained

            with watch.stage(context.name), explained(context.name, stage, context.ranks.device):
                return function(stage, context)

    def _on_main(self, work: Callable[[], T]) -> T:
        """What rank 0 makes of ``work``, on every rank. Its error ends the other ranks without a word."""
        if self.ranks.world == 1:
            return work()
        box: tuple[T | None, int] = (None, 0)
        failure: PosttuneError | None = None
        with self.ranks.alone("what rank 0 does alone"):
            if self.ranks.main:
                try:
                    box = (work(), 0)
                except PosttuneError as error:
                    failure, box = error, (None, error.exit_code)
        made, code = self.ranks.broadcast_object(box)
        if failure is not None:
            raise failure
        if code:
            raise SystemExit(code)
        return cast("T", made)

    def _marker(self, step: Step, stage: Stage) -> StageMarker:
        settings = stage_settings(self.config, step.name)
        first, seconds = self.folder.last_checkpoint_step(), 0.0
        if step.marker is not None and step.action == "continue":
            first, seconds = step.marker.first_checkpoint, step.marker.seconds
        return StageMarker(
            "running", stage.kind, digest(settings), settings, seconds=seconds, first_checkpoint=first
        )

    def _remember(self, name: str, marker: StageMarker) -> None:
        if self.ranks.main:
            self.folder.write_marker(name, marker)

    def _ended(self, marker: StageMarker, status: StageStatus, result: StageResult) -> StageMarker:
        output = self.folder.stored(result.output) if result.output is not None else None
        return replace(marker, status=status, output=output, metrics=result.metrics, seconds=result.seconds)

    def _remembered(self, marker: StageMarker) -> StageResult:
        output = self.folder.restored(marker.output) if marker.output is not None else None
        return StageResult(output, dict(marker.metrics), marker.seconds, skipped=True)

    def _stop_if_asked(self) -> None:
        if self.ranks.any(self.interrupt.is_set()):
            fix = "the same command with --resume goes on"
            raise Interrupted("stopped between two stages", who=str(self.folder.path), fix=fix)


def stage_function(kind: str) -> StageFunction:
    """The function that runs a kind of stage, imported when it is needed."""
    module, name = FUNCTIONS[kind].split(":")
    return cast("StageFunction", getattr(importlib.import_module(module), name))


def _register_stack_dump() -> None:
    """``kill -USR1`` shows what every thread of a run is doing."""
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or 2, all_threads=True)
