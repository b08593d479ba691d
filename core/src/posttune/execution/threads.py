"""Several calls at a time in threads. A thread cannot be killed: one that overruns is left behind."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from posttune.errors import RunError
from posttune.execution.inline import timed
from posttune.execution.outcome import Call, Limits, Outcome, Unit

log = logging.getLogger("posttune.execution")

MOST_LEFT_BEHIND = 64
_said = threading.Event()


class Threads:
    """Runs the calls of one reward in at most ``workers`` threads."""

    def __init__(self, call: Call, workers: int, who: str) -> None:
        self._call = call
        self._workers = workers
        self._who = who
        self._left: list[threading.Thread] = []

    def run(self, units: Sequence[Unit], limits: Limits) -> list[Outcome]:
        """Call for each unit. Raises RunError where too many threads hang already."""
        _say_once(self._who)
        batch = _Batch(self._call, units, limits)
        for _ in range(min(self._workers, len(units))):
            batch.start_thread()
        try:
            while batch.waits():
                self._replace(batch)
        finally:
            batch.closed = True
        return batch.results()

    def _replace(self, batch: _Batch) -> None:
        """Give every thread that overruns up, and start another in its place."""
        for thread in batch.overdue():
            self._left = [each for each in self._left if each.is_alive()] + [thread]
            if len(self._left) > MOST_LEFT_BEHIND:
                raise RunError(
                    f"{len(self._left)} calls hang in threads, which cannot be killed",
                    who=self._who,
                    fix="set executor: process, whose workers are killed",
                )
            if batch.more:
                batch.start_thread()

    def close(self) -> None:
        """Nothing can be done about threads that hang; they end with the process."""


class _Batch:
    """The calls of one batch, shared by the threads that make them and the one that waits."""

    def __init__(self, call: Call, units: Sequence[Unit], limits: Limits) -> None:
        self._call, self._units, self._limits = call, units, limits
        self._changed = threading.Condition()
        self._next = 0
        self._running: dict[int, tuple[threading.Thread, float]] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._broken: BaseException | None = None
        self.closed = False

    @property
    def more(self) -> bool:
        """Whether any call has yet to begin."""
        return self._next < len(self._units) and not self.closed

    def start_thread(self) -> None:
        """One thread that makes calls until none is left."""
        threading.Thread(target=self._work, daemon=True, name="posttune-reward").start()

    def waits(self) -> bool:
        """Wait for a change. False once every call has an outcome, or one failed and that ends it."""
        with self._changed:
            if self._over():
                return False
            self._changed.wait(self._patience())
            return not self._over()

    def overdue(self) -> list[threading.Thread]:
        """The threads whose calls have run out of time, which is then those calls' outcome."""
        now = time.monotonic()
        with self._changed:
            late = self._limits.deadline is not None and now >= self._limits.deadline
            found = []
            for index, (thread, began) in list(self._running.items()):
                limit = self._limits.of(self._units[index])
                if late or (limit is not None and now - began >= limit):
                    self._outcomes[index] = Outcome(now - began, late=late)
                    del self._running[index]
                    found.append(thread)
            if late:
                self.closed = True
        return found

    def results(self) -> list[Outcome]:
        """One outcome a unit, in order."""
        if self._broken is not None:
            raise self._broken
        return [self._outcomes.get(index, Outcome(late=True)) for index in range(len(self._units))]

    def _over(self) -> bool:
        if self._broken is not None or self.closed or len(self._outcomes) == len(self._units):
            return True
        return self._limits.fail_fast and any(each.error for each in self._outcomes.values())

    def _patience(self) -> float | None:
        """Seconds until something is overdue."""
        ends = [] if self._limits.deadline is None else [self._limits.deadline]
        for index, (_, began) in self._running.items():
            limit = self._limits.of(self._units[index])
            ends += [] if limit is None else [began + limit]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _work(self) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                if not self.more:
                    return
                index = self._next
                self._next += 1
                self._running[index] = (me, time.monotonic())
                self._changed.notify_all()  # there may be a new deadline
            try:
                outcome = timed(self._call, self._units[index])
            except BaseException as error:  # noqa: BLE001  (raised where the batch is waited for)
                self._fail(error)
                return
            with self._changed:
                if self._running.pop(index, None) is None:
                    return  # given up in the meantime
                self._outcomes[index] = outcome
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._broken = error
            self._changed.notify_all()


def _say_once(who: str) -> None:
    if not _said.is_set():
        _said.set()
        log.warning(
            "%s runs in threads: a call that hangs is given up after its timeout but runs on, since no "
            "thread can be killed; executor: process kills",
            who,
        )
