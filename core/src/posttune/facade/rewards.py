"""All rewards of a stage: each configured instance is called on its own, and all of them side by side."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from posttune.config.base import PluginRef
from posttune.errors import PosttuneError
from posttune.execution import clock
from posttune.execution.inline import settled
from posttune.execution.outcome import Checked, Unit
from posttune.execution.scorer import Scorer
from posttune.execution.statistics import RewardStats
from posttune.facade.values import as_list, as_number, shown
from posttune.pipeline import Member
from posttune.types import Needs, Sample, Score

__all__ = ["RewardCall", "RewardStats", "Rewards", "Scoring"]

HOOK = "reward_score"
T = TypeVar("T")


class Rewards:
    """The rewards of a stage. ``stats`` tells of the last batch, by label.

    ``refs`` says how each is executed; without them one sample follows another.
    """

    def __init__(self, members: Sequence[Member], refs: Sequence[PluginRef] | None = None) -> None:
        calls = [RewardCall(member) for member in members]
        self.needs: dict[str, Needs] = {call.label: call.needs() for call in calls}
        self.stats: dict[str, RewardStats] = {}
        self._last: dict[str, _Task] = {}
        plain = [PluginRef(name=member.id.name, label=member.id.label or None) for member in members]
        self._scorers = tuple(
            Scorer(call, self.needs[call.label], ref)
            for call, ref in zip(calls, plain if refs is None else refs, strict=True)
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels, in the order of the configuration."""
        return tuple(scorer.label for scorer in self._scorers)

    @property
    def pids(self) -> dict[str, tuple[int, ...]]:
        """The worker processes that are alive, by label."""
        return {scorer.label: scorer.pids for scorer in self._scorers}

    def score(self, samples: Sequence[Sample]) -> dict[str, list[Score]]:
        """The scores of every reward by label: a float, a dict of floats or None per sample, in order.

        NaN becomes None, the unscorable sample. Raises PluginCallError and PluginReturnError,
        which name the label and the sample.
        """
        if len(self._scorers) == 1 and not self._last:
            return self._noted({self.labels[0]: self._scorers[0].score(samples)})
        return self.submit(samples).result()

    def submit(self, samples: Sequence[Sample]) -> Scoring:
        """Begin to score, each reward in a thread of its own, and go on; the result is waited for later.

        A batch that is submitted before the last one is done follows it. A reward that needs a device
        begins when the result is asked for: its memory is not to be had beside that of other work.
        """
        tasks = {}
        for scorer in self._scorers:
            label, before = scorer.label, self._last.get(scorer.label)
            task = _Task(scorer.score, samples, before, later=self.needs[label].device)
            self._last[label] = tasks[label] = task
        return Scoring(tasks, self._noted)

    def close(self) -> None:
        """End all worker processes, at work or not. They end with this object too."""
        for scorer in self._scorers:
            scorer.close()

    def _noted(self, found: Mapping[str, tuple[list[Score], RewardStats]]) -> dict[str, list[Score]]:
        self.stats |= {label: stats for label, (_, stats) in found.items()}
        return {label: scores for label, (scores, _) in found.items()}


class Scoring:
    """A batch that is being scored. ``seconds`` and ``stats``, by label, are those of its result."""

    def __init__(
        self,
        tasks: Mapping[str, _Task],
        done: Callable[[Mapping[str, tuple[list[Score], RewardStats]]], dict[str, list[Score]]],
    ) -> None:
        self._tasks, self._done = tasks, done
        self._began = time.monotonic()
        self.stats: dict[str, RewardStats] = {}
        self.seconds = 0.0  # from its beginning until the last reward was done

    def result(self) -> dict[str, list[Score]]:
        """Wait for all rewards. Returns and raises what ``Rewards.score`` does, of the first that failed."""
        for task in self._tasks.values():
            task.begin()
        for task in self._tasks.values():
            task.wait()
        found = {label: task.result() for label, task in self._tasks.items()}
        self.seconds = max(task.ended for task in self._tasks.values()) - self._began
        self.stats = {label: stats for label, (_, stats) in found.items()}
        return self._done(found)


class _Task:
    """A call in a daemon thread, which does not keep the process from ending."""

    def __init__(
        self,
        function: Callable[[Sequence[Sample]], tuple[list[Score], RewardStats]],
        samples: Sequence[Sample],
        after: _Task | None,
        *,
        later: bool,
    ) -> None:
        self._function, self._samples, self._after = function, samples, after
        self._found: tuple[list[Score], RewardStats] | None = None
        self._error: BaseException | None = None
        self.ended = 0.0  # on time.monotonic()'s clock
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._work,), daemon=True)
        self._begun = threading.Lock()
        if not later:
            self.begin()

    def begin(self) -> None:
        """Start, unless that is done. What goes before starts first."""
        if self._begun.acquire(blocking=False):
            if self._after is not None:
                self._after.begin()
            self._thread.start()

    def wait(self) -> None:
        self._thread.join()

    def result(self) -> tuple[list[Score], RewardStats]:
        if self._error is not None:
            raise self._error
        assert self._found is not None
        return self._found

    def _work(self) -> None:
        if self._after is not None:
            self._after.wait()
            self._after = None
        try:
            self._found = self._function(self._samples)
        except BaseException as error:  # noqa: BLE001  (raised where the result is asked for)
            self._error = error
        self.ended = time.monotonic()


class RewardCall:
    """Calls one reward's hook and checks what comes back."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.id = member.id
        self.label = member.label

    def needs(self) -> Needs:
        """What the reward requires. Loads a function that is given by path."""
        needs = _needs(self._member)
        return replace(needs, asynchronous=True) if _is_async(self._member) else needs

    def __call__(self, unit: Unit) -> Checked:
        """The checked scores. Raises PluginCallError, PluginReturnError, and errors of posttune."""
        with clock.timeouts() as late:
            answers = self._begin(unit)
            if inspect.isawaitable(answers):
                answers = self._guarded(unit, lambda: settled(answers))
        return replace(self.check(unit, answers), timeouts=len(late))

    async def start(self, unit: Unit) -> object:
        """The answers, not yet checked, of a reward that may be async."""
        answers = self._begin(unit)
        if not inspect.isawaitable(answers):
            return answers
        try:
            return await answers
        except PosttuneError:
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and _hears_the_user():
                raise
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            raise self._member.failed(HOOK, error, self._about(unit)) from error

    def check(self, unit: Unit, answers: object) -> Checked:
        """Scores of the right number and type. Raises PluginReturnError."""
        member = self._member
        found = as_list(answers)
        if found is None:
            raise member.wrong(HOOK, f"{shown(answers)}, not a list of scores")
        if len(found) != len(unit):
            raise member.wrong(HOOK, f"{len(found)} scores for {len(unit)} samples")
        scores = [_score(member, sample, answer) for sample, answer in zip(unit, found, strict=True)]
        return Checked(scores, scores.count(None) - sum(answer is None for answer in found))

    def _begin(self, unit: Unit) -> object:
        return self._guarded(unit, lambda: self._member.call_about(HOOK, self._about(unit), samples=unit))

    def _about(self, unit: Unit) -> str:
        return f" (label {self.label!r}, {len(unit)} samples, the first is {unit[0].name})"

    def _guarded(self, unit: Unit, call: Callable[[], T]) -> T:
        try:
            return call()
        except PosttuneError:
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and _hears_the_user():
                raise
            raise self._member.failed(HOOK, error, self._about(unit)) from error


def _hears_the_user() -> bool:
    """Whether Ctrl-C may have raised it: only in the main thread. Elsewhere a reward raises its own."""
    return threading.current_thread() is threading.main_thread() and "POSTTUNE_WORKER" not in os.environ


def _needs(member: Member) -> Needs:
    if not member.implements("reward_needs"):
        return Needs()
    needs = member.call("reward_needs")
    if not isinstance(needs, Needs):
        raise member.wrong("reward_needs", f"{shown(needs)}, not Needs")
    return needs


def _is_async(member: Member) -> bool:
    hooks = getattr(member.manager.hook, HOOK).get_hookimpls()
    return any(inspect.iscoroutinefunction(hook.function) for hook in hooks)


def _score(member: Member, sample: Sample, answer: object) -> Score:
    if answer is None:
        return None
    if isinstance(answer, Mapping):
        return _dimensions(member, sample, answer)
    number = as_number(answer)
    if number is None:
        raise member.wrong(HOOK, f"{shown(answer)} for sample {sample.name} (label {member.label!r})")
    return None if math.isnan(number) else number


def _dimensions(member: Member, sample: Sample, answer: Mapping[Any, object]) -> Score:
    """A dict of dimensions; one NaN makes the sample unscorable."""
    numbers: dict[str, float] = {}
    for name, value in answer.items():
        number = as_number(value)
        if number is None or not isinstance(name, str):
            where = f"for dimension {name!r} of sample {sample.name} (label {member.label!r})"
            raise member.wrong(HOOK, f"{shown(value)} {where}")
        numbers[name] = number
    if not numbers:
        raise member.wrong(HOOK, f"an empty dict for sample {sample.name} (label {member.label!r})")
    return None if any(map(math.isnan, numbers.values())) else cast("Score", numbers)
