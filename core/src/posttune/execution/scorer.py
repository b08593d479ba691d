"""One reward as it is configured to run: cache, executor, limits, and what an error does."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from posttune.config.base import PluginRef, RewardRef
from posttune.errors import PluginId, PosttuneError, UserError
from posttune.execution.cache import ScoreCache, visible
from posttune.execution.clock import seconds_by_sample
from posttune.execution.inline import run_async, run_inline
from posttune.execution.main_module import refuse_main
from posttune.execution.outcome import Checked, Limits, Outcome, Unit
from posttune.execution.processes import Processes
from posttune.execution.statistics import RewardStats, spread
from posttune.execution.threads import Threads
from posttune.types import Needs, Sample, Score

log = logging.getLogger("posttune.execution")

MOST_WORKERS = 8
ASYNC_WORKERS = 32
SLOW = 1.0  # seconds of a sample that the log names
TIMEOUT = 30.0  # seconds, where a call can be given up


class RewardCaller(Protocol):
    """The facade's side: calls the hook and checks what comes back."""

    @property
    def id(self) -> PluginId: ...
    def __call__(self, unit: Unit) -> Checked: ...
    async def start(self, unit: Unit) -> object: ...
    def check(self, unit: Unit, answers: object) -> Checked: ...


@dataclass
class _Tally:
    """Counts of a batch while it is scored."""

    nan: int = 0
    timeouts: int = 0
    errors: int = 0
    cached: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)


class Scorer:
    """Scores batches with one reward."""

    def __init__(self, call: RewardCaller, needs: Needs, ref: PluginRef) -> None:
        self.ref = ref if isinstance(ref, RewardRef) else RewardRef(**ref.model_dump())
        self._call, self._needs = call, needs
        self.label = self.ref.tag
        self._cache = ScoreCache(self.ref.cache, needs)
        self._refuse_what_cannot_be()
        self._pool = self._make_pool()

    @property
    def side_by_side(self) -> bool:
        """Whether it makes several calls at a time."""
        return self._pool is not None or self._needs.asynchronous

    @property
    def pids(self) -> tuple[int, ...]:
        """Its worker processes."""
        return self._pool.pids if isinstance(self._pool, Processes) else ()

    def score(self, samples: Sequence[Sample]) -> tuple[list[Score], RewardStats]:
        """One score a sample, in order. Raises PosttuneError where the policy for errors is to raise."""
        began = time.monotonic()
        tally = _Tally()
        scores: dict[int, Score] = {}
        places = self._places(samples, scores, tally)
        if places:
            self._fill([samples[same[0]] for same in places], places, scores, tally)
        found = [scores[i] for i in range(len(samples))]
        unscorable = found.count(None)
        return found, RewardStats(
            scored=len(found) - unscorable,
            unscorable=unscorable,
            nan=tally.nan,
            seconds=time.monotonic() - began,
            timeouts=tally.timeouts,
            errors=tally.errors,
            cached=tally.cached,
            failed=frozenset(tally.failed),
            **spread(tally.seconds),
        )

    def close(self) -> None:
        """End its workers."""
        if self._pool is not None:
            self._pool.close()

    def _places(self, samples: Sequence[Sample], scores: dict[int, Score], tally: _Tally) -> list[list[int]]:
        """Positions of the samples to be scored, those of equal content together."""
        if not self.ref.cache:
            return [[i] for i in range(len(samples))]
        places: dict[object, list[int]] = {}
        for i, sample in enumerate(samples):
            key = self._cache.key(sample)
            if key is not None and key in self._cache:
                scores[i] = self._cache.get(key)
                tally.cached += 1
            else:
                places.setdefault(i if key is None else key, []).append(i)
        tally.cached += sum(len(same) - 1 for same in places.values())
        return list(places.values())

    def _fill(
        self, samples: list[Sample], places: list[list[int]], scores: dict[int, Score], tally: _Tally
    ) -> None:
        """Score ``samples`` and put each score where its like stand."""
        whole = not self._needs.each or self._in_one_call
        units: list[Unit] = [samples] if whole else [[sample] for sample in samples]
        with seconds_by_sample() as told:
            outcomes = self._run(units)
        position = 0
        for unit, outcome in zip(units, outcomes, strict=True):
            found = self._settled(unit, outcome, tally)
            for sample, score in zip(unit, found, strict=True):
                tally.seconds[sample.id] = told.get(sample.id, outcome.seconds / len(unit))
                scores |= dict.fromkeys(places[position], score)
                if outcome.checked is None:
                    tally.failed.update(places[position])
                key = self._cache.key(sample)
                if key is not None and outcome.checked is not None and not outcome.checked.timeouts:
                    self._cache.put(key, score)
                position += 1
        worst = max(samples, key=lambda sample: tally.seconds[sample.id])
        if tally.seconds[worst.id] >= SLOW:
            seconds = tally.seconds[worst.id]
            log.info("reward %r: the slowest sample, %s, took %.1f s", self.label, worst.name, seconds)
        if tally.timeouts:
            log.warning(
                "reward %r: %d of %d samples ran out of time (slowest: %s)",
                *(self.label, tally.timeouts, len(samples), worst.name),
            )

    @property
    def _in_one_call(self) -> bool:
        """Whether nothing asks for samples apart: then one call is the cheapest."""
        ref = self.ref
        plain = ref.executor == "inline" and ref.on_error == "raise" and ref.batch_timeout is None
        return plain and not self._needs.asynchronous

    def _run(self, units: Sequence[Unit]) -> list[Outcome]:
        ref = self.ref
        limits = Limits(
            timeout=ref.timeout if self._pool is None else ref.timeout or TIMEOUT,
            deadline=None if ref.batch_timeout is None else time.monotonic() + ref.batch_timeout,
            fail_fast=ref.on_error == "raise",
        )
        if self._needs.asynchronous and ref.executor != "process":
            workers = ref.workers or ASYNC_WORKERS
            return _raised(run_async(self._call.start, self._call.check, units, limits, workers), limits)
        if self._pool is not None:
            return _raised(self._pool.run(units, limits), limits)
        return _raised(run_inline(self._call, units, limits), limits)

    def _settled(self, unit: Unit, outcome: Outcome, tally: _Tally) -> Sequence[Score]:
        """The scores of a call; what the policy says where it has none."""
        if outcome.checked is not None:
            tally.nan += outcome.checked.nan
            tally.timeouts += outcome.checked.timeouts
            return outcome.checked.scores
        if outcome.error is not None:
            tally.errors += len(unit)
        else:
            tally.timeouts += len(unit)
        return [None if outcome.late else self.ref.value] * len(unit)

    def _make_pool(self) -> Threads | Processes | None:
        workers = self.ref.workers or min(MOST_WORKERS, os.cpu_count() or 1)
        if self.ref.executor == "process":
            return Processes(self.ref, self._call.id, workers, self._shrunk)
        if self.ref.executor == "thread" and not self._needs.asynchronous:
            return Threads(self._call, workers, f"reward {self.label!r}")
        return None

    def _shrunk(self, unit: Unit) -> Unit:
        return [visible(sample, self._needs) for sample in unit]

    def _refuse_what_cannot_be(self) -> None:
        ref, needs = self.ref, self._needs
        who = f"reward {self.label!r}"
        if needs.isolated and ref.executor != "process":
            what = "it runs only in a process of its own, as its options ask for"
            raise UserError(what, who=who, fix="set executor: process on the reward")
        if ref.executor == "process":
            refuse_main(ref)
        elif ref.executor == "inline" and not needs.asynchronous:
            self._refuse_inline(who)
        if ref.cache and not needs.each:
            what = "cache needs scores that depend on one sample alone, and it scores all samples at once"
            raise UserError(what, who=who, fix="remove cache")

    def _refuse_inline(self, who: str) -> None:
        if self.ref.timeout is not None or (self.ref.batch_timeout is not None and not self._needs.each):
            fix = "set executor: process (or thread, where a call that hangs is left behind)"
            raise UserError("a call in this thread cannot be stopped, so no timeout holds", who=who, fix=fix)
        if self.ref.workers is not None:
            what = "workers has no effect with executor: inline"
            raise UserError(what, who=who, fix="set executor: thread or process")


def _raised(outcomes: list[Outcome], limits: Limits) -> list[Outcome]:
    """The outcomes, unless one is an error and errors end the batch."""
    errors: list[PosttuneError] = [each.error for each in outcomes if each.error is not None]
    if errors and limits.fail_fast:
        raise errors[0]
    return outcomes
