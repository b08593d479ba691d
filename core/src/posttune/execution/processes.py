"""Several calls at a time in processes. One that overruns is killed, with what it started, and replaced.

Needs POSIX. Not a security sandbox: a worker has its user's rights.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttune.config.base import RewardRef
from posttune.errors import DataError, PluginCallError, PluginId, PosttuneError, RunError
from posttune.execution import frames
from posttune.execution.main_module import main_file
from posttune.execution.nursery import Nursery
from posttune.execution.outcome import Checked, Limits, Outcome, Unit
from posttune.execution.remote_errors import unpack_error
from posttune.execution.worker import ENTRY, PRELOAD

START_LIMIT = 300.0  # seconds for a worker to compose its reward, a model that it loads included
ANSWER_LIMIT = 30.0  # seconds for a message that has begun to arrive in full
AHEAD = 8  # calls that a worker whose calls are quick is sent before it has answered
AHEAD_BYTES = 1 << 14  # of them; more might not fit into the socket of a worker that hangs
QUICK = 0.01  # seconds
WATCH = 1.0  # seconds between looks at whether the process that forks is alive


@dataclass(eq=False)
class _Worker:
    """A process, and what it is doing."""

    channel: socket.socket
    since: float  # when it was asked for, or began the call that it makes
    pid: int | None = None
    ready: bool = False
    quick: bool = False
    sent: deque[int] = field(default_factory=deque)  # positions of its calls; it makes the first

    @property
    def unit(self) -> int | None:
        """Position of the call that it makes."""
        return self.sent[0] if self.sent else None


@dataclass
class _Batch:
    """The calls of one batch."""

    units: Sequence[Unit]
    limits: Limits
    shrink: Callable[[Unit], Unit]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    pending: deque[int] = field(default_factory=deque)
    failed: bool = False
    began: float = field(default_factory=time.monotonic)
    started: float | None = None  # when a worker was first there; its start is not the samples' time

    @property
    def deadline(self) -> float | None:
        """Of the batch, where it has one and is under way."""
        if self.limits.deadline is None or self.started is None:
            return None
        return self.limits.deadline + self.started - self.began

    @property
    def open(self) -> bool:
        """Whether a call has no outcome yet that is still to be waited for."""
        return len(self.outcomes) < len(self.units) and not (self.failed and self.limits.fail_fast)


class Processes:
    """Runs the calls of one reward in ``size`` processes, which are started on first use and kept."""

    def __init__(self, ref: RewardRef, who: PluginId, size: int, shrink: Callable[[Unit], Unit]) -> None:
        self._ref, self._who, self._size, self._shrink = ref, who, size, shrink
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._nursery: Nursery | None = None
        self._closing = False  # asks a batch that another thread runs to end

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that are alive."""
        return tuple(worker.pid for worker in self._workers if worker.pid is not None)

    def run(self, units: Sequence[Unit], limits: Limits) -> list[Outcome]:
        """Call for each unit. Raises what composing the reward in a worker raises."""
        batch = _Batch(units, limits, self._shrink, pending=deque(range(len(units))))
        with self._lock:
            if any(worker.ready for worker in self._workers):
                batch.started = batch.began
            try:
                while batch.open and not self._closing:
                    self._turn(batch)
            finally:
                for worker in [each for each in self._workers if each.unit is not None]:
                    self._discard(worker)
        return [batch.outcomes.get(index, Outcome(late=True)) for index in range(len(units))]

    def close(self) -> None:
        """End all workers. What is not scored by then has run out of time."""
        self._closing = True
        with self._lock:
            self._closing = False
            for worker in list(self._workers):
                self._discard(worker)
            if self._nursery is not None:
                self._nursery.close()
                self._nursery = None

    def _turn(self, batch: _Batch) -> None:
        """Hand out what can be, wait for whatever comes first, and take it in."""
        self._give_up(batch)
        while len(self._workers) < min(self._size, len(self._busy()) + len(batch.pending)):
            self._start_worker()
        for worker in self._workers:
            if worker.ready and not worker.sent and batch.pending:
                self._hand_out(worker, batch)
        for worker in self._workers:
            while worker.sent and worker.quick and len(worker.sent) < AHEAD:
                if len(batch.pending) <= len(self._workers) or not self._hand_out(worker, batch):
                    break
        for key, _ in self._selector.select(self._patience(batch)):
            self._take(key.data, batch)
        if self._nursery is not None and not self._nursery.alive:
            raise self._cannot_start("the process that workers are forked from has ended")

    def _busy(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.unit is not None]

    def _hand_out(self, worker: _Worker, batch: _Batch) -> bool:
        """Send the next call. False where it is too large to be sent ahead."""
        index = batch.pending.popleft()
        try:
            request = pickle.dumps(batch.shrink(batch.units[index]))
        except Exception as error:  # noqa: BLE001  (anything a column's type may raise)
            batch.outcomes[index] = Outcome(error=_unsendable(batch.units[index], error, self._who))
            batch.failed = True
            return True
        if not worker.sent:
            worker.since = time.monotonic()
        elif len(request) * AHEAD > AHEAD_BYTES:
            batch.pending.appendleft(index)
            return False
        worker.sent.append(index)
        with contextlib.suppress(OSError):  # it has died, which its socket will tell
            frames.send(worker.channel, request)
        return True

    def _take(self, worker: _Worker, batch: _Batch) -> None:
        data = frames.receive(worker.channel)
        message = _parsed(data)
        if message is None:
            self._died(worker, batch)
        elif "pid" in message:
            worker.pid = int(message["pid"])
        elif "ready" in message:
            worker.ready = True
            batch.started = batch.started or time.monotonic()
        elif "unavailable" in message:
            raise self._cannot_start(message["unavailable"])
        elif "failed" in message:
            self._discard(worker)
            raise unpack_error(message["failed"], self._who)
        elif worker.sent:
            batch.outcomes[worker.sent.popleft()] = outcome = self._outcome(message)
            batch.failed = batch.failed or outcome.error is not None
            worker.since, worker.quick = time.monotonic(), outcome.seconds < QUICK

    def _outcome(self, message: dict[str, Any]) -> Outcome:
        seconds = float(message["seconds"])
        if "error" in message:
            return Outcome(seconds, error=unpack_error(message["error"], self._who))
        return Outcome(seconds, Checked(message["scores"], message["nan"], message["timeouts"]))

    def _died(self, worker: _Worker, batch: _Batch) -> None:
        if worker.unit is None:
            self._discard(worker)
            if not worker.ready:
                raise self._cannot_start("it ended while the reward was loaded")
            return
        seconds = time.monotonic() - worker.since
        ids = ", ".join(sample.name for sample in batch.units[worker.unit][:3])
        memory = f" (memory_mb is {self._ref.memory_mb})" if self._ref.memory_mb else ""
        error = PluginCallError(
            f"its worker process died while scoring sample {ids}{memory}",
            plugin=self._who,
            fix="look for what ends a process: memory, a crash in C code, os._exit; or set on_error: mask",
        )
        self._end_call(worker, batch, Outcome(seconds, error=error))
        batch.failed = True

    def _end_call(self, worker: _Worker, batch: _Batch, outcome: Outcome) -> None:
        """Let the worker go with the call that it makes; what it was sent ahead is for others."""
        batch.outcomes[worker.sent.popleft()] = outcome
        batch.pending.extendleft(reversed(worker.sent))
        self._discard(worker)

    def _give_up(self, batch: _Batch) -> None:
        """Kill what has run out of time."""
        now = time.monotonic()
        late = batch.deadline is not None and now >= batch.deadline
        for worker in list(self._workers):
            if worker.unit is not None:
                limit = batch.limits.of(batch.units[worker.unit])
                if late or (limit is not None and now - worker.since >= limit):
                    self._end_call(worker, batch, Outcome(now - worker.since, late=late))
            elif not worker.ready and now - worker.since >= START_LIMIT:
                raise self._cannot_start(f"it had not loaded the reward after {START_LIMIT:g} s")
        if late:
            batch.outcomes |= {index: Outcome(late=True) for index in batch.pending}
            batch.pending.clear()

    def _patience(self, batch: _Batch) -> float:
        """Seconds until something runs out of time."""
        if not batch.open:
            return 0.0
        ends = [time.monotonic() + WATCH]
        ends += [] if batch.deadline is None else [batch.deadline]
        for worker in self._busy():
            limit = batch.limits.of(batch.units[worker.unit or 0])
            ends += [] if limit is None else [worker.since + limit]
        return max(0.0, min(ends) - time.monotonic())

    def _start_worker(self) -> None:
        if self._nursery is None:
            self._nursery = Nursery(ENTRY, PRELOAD)
        channel = self._nursery.fork()
        channel.settimeout(ANSWER_LIMIT)
        worker = _Worker(channel, time.monotonic())
        self._workers.append(worker)
        self._selector.register(channel, selectors.EVENT_READ, worker)
        frames.send(channel, json.dumps(_setup(self._ref)).encode())

    def _discard(self, worker: _Worker) -> None:
        self._selector.unregister(worker.channel)
        self._workers.remove(worker)
        if worker.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.pid, signal.SIGKILL)
        worker.channel.close()

    def _cannot_start(self, what: str) -> RunError:
        fix = "see what it wrote to stderr; raise memory_mb if that is set"
        return RunError(f"a worker process cannot be had: {what}", who=str(self._who), fix=fix)


def _setup(ref: RewardRef) -> dict[str, Any]:
    from posttune.reward.loading import folders

    return {
        "ref": {"name": ref.name, "label": ref.label, "options": ref.options},
        "memory_mb": ref.memory_mb,
        "folders": [str(folder) for folder in folders()],
        "main": main_file(),
    }


def _parsed(data: bytes | None) -> dict[str, Any] | None:
    """A worker's message; None where it sent none, or nonsense."""
    try:
        message = None if data is None else json.loads(data)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _unsendable(unit: Unit, error: Exception, who: PluginId) -> PosttuneError:
    what = f"sample {unit[0].name} cannot be sent to another process: {type(error).__name__}: {error}"
    return DataError(what, who=str(who), fix="set executor: thread, or leave the column out")
