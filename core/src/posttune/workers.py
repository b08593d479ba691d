"""Worker processes for code that may hang, crash or eat memory: one that overruns is killed and replaced.

For plugins and scripts, whether or not a run executes them in processes of its own:

    pool = Pool("my_package._slow:solve", memory_mb=2048)
    try:
        answer, seconds = pool.ask({"x": 1}, limit=5.0)
    except OutOfTime:
        ...

``solve`` takes and returns what JSON can hold. Its module is imported once, in a process that workers are
forked from in milliseconds and that never imports the caller's ``__main__``. Workers end with the
caller's process, however it ends. Safe to use from any thread. Needs POSIX. No sandbox.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttune.errors import RunError
from posttune.execution import clock, frames
from posttune.execution.frames import tell
from posttune.execution.nursery import Nursery

__all__ = ["OutOfTime", "Pool", "WorkerDied"]

MIN_WORKERS = 8  # so that a few that hang hold up nobody; a worker costs little memory
START_LIMIT = 120.0  # seconds that importing the function's module may take
_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


class OutOfTime(Exception):
    """The call overran its limit, and its worker was killed. The sample being scored counts as timed out."""


class WorkerDied(Exception):
    """The worker ended without an answer: out of memory, a crash, or an exception, which is the message."""


@dataclass
class _Worker:
    """One process that answers requests, one after the other."""

    pid: int
    channel: socket.socket

    def ask(self, request: bytes, limit: float) -> tuple[Any, float]:
        began = time.monotonic()
        try:
            self.channel.settimeout(limit)
            frames.send(self.channel, request)
            answer = _message(self.channel, began + limit)
        except TimeoutError as error:
            raise OutOfTime from error
        except OSError as error:
            raise WorkerDied from error
        if "raised" in answer:
            raise WorkerDied(answer["raised"])
        return answer["answer"], time.monotonic() - began

    def waits(self) -> bool:
        """Whether it is there and waits for a request."""
        try:
            self.channel.setblocking(False)
            self.channel.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # closed

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.channel.close()


class Pool:
    """Workers by need, at most ``size`` at a time, that call one function: ``target`` is ``module:function``.

    ``memory_mb`` bounds the address space that a worker may take beyond what it starts with.
    """

    def __init__(self, target: str, *, size: int | None = None, memory_mb: int | None = None) -> None:
        self._target, self._memory_mb = target, memory_mb
        self._size = size or max(MIN_WORKERS, os.cpu_count() or 0)
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        self._free: list[_Worker] = []
        self._slots = threading.Semaphore(self._size)
        self._lock = threading.Lock()
        self._nursery: Nursery | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """The workers that wait for a request."""
        return tuple(worker.pid for worker in self._free)

    def ask(self, request: Any, limit: float) -> tuple[Any, float]:
        """The function's answer within ``limit`` seconds of work, and the seconds that it took.

        Waiting for a free worker, which is as short as the limit of those at work, does not count, nor
        does the first import. Raises OutOfTime, WorkerDied, and RunError where no worker can be started.
        """
        data = json.dumps(request).encode()
        with self._slots:
            worker = self._idle()
            if worker is not None:
                try:
                    return self._asked(worker, data, limit)
                except WorkerDied as error:
                    if error.args:
                        raise
            return self._asked(self._new(), data, limit)

    def close(self) -> None:
        """End all workers. The pool can be used again."""
        with self._lock:
            for worker in self._free:
                worker.end()
            self._free.clear()
            self._end_nursery()

    def _asked(self, worker: _Worker, request: bytes, limit: float) -> tuple[Any, float]:
        try:
            answer = worker.ask(request, limit)
        except BaseException as error:
            worker.end()
            if isinstance(error, OutOfTime):
                clock.note_timeout()
            raise
        with self._lock:
            self._free.append(worker)
        return answer

    def _idle(self) -> _Worker | None:
        with self._lock:
            while self._free:
                worker = self._free.pop()
                if worker.waits():
                    return worker
                worker.channel.close()
        return None

    def _new(self) -> _Worker:
        with self._lock:
            for again in (True, False):  # somebody may have killed the nursery
                if self._nursery is None:
                    self._nursery = self._started()
                try:
                    return self._hatched(self._nursery)
                except OSError as error:
                    self._end_nursery()
                    if not again:
                        raise self._none(f"it could not be reached: {error}") from error
        raise AssertionError("unreachable")

    def _started(self) -> Nursery:
        if not hasattr(os, "fork"):
            raise self._none("this system cannot fork")
        return Nursery(f"{__name__}:serve", [self._target.partition(":")[0]])

    def _hatched(self, nursery: Nursery) -> _Worker:
        channel = nursery.fork()
        deadline = time.monotonic() + START_LIMIT
        try:
            pid = int(_message(channel, deadline)["pid"])
            with contextlib.suppress(OSError):  # where it is unavailable, it is gone by now, and says why
                tell(channel, {"target": self._target, "memory_mb": self._memory_mb})
            ready = _message(channel, deadline)
        except BaseException:
            channel.close()
            raise
        if "unavailable" in ready:
            channel.close()
            raise self._none(ready["unavailable"])
        return _Worker(pid, channel)

    def _end_nursery(self) -> None:
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None

    def _forget(self) -> None:
        """After a fork the workers are the parent's: close this process's ends only."""
        for worker in self._free:
            worker.channel.close()
        self._end_nursery()
        self._reset()

    def _none(self, what: str) -> RunError:
        module = self._target.partition(":")[0]
        fix = f"check that `python -c 'import {module}'` works in this environment, on Linux or macOS"
        return RunError(f"no worker process: {what}", who=self._target, fix=fix)


def _message(channel: socket.socket, deadline: float) -> dict[str, Any]:
    """The next message. Raises TimeoutError, and OSError where the other side is gone."""
    data = frames.receive_by(channel, deadline)
    if data is None:
        raise ConnectionResetError("the other side is gone")
    message: dict[str, Any] = json.loads(data)
    return message


def _after_fork() -> None:
    for pool in list(_pools):
        pool._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# --- in the worker -------------------------------------------------------------------------------


def serve(channel: socket.socket) -> None:
    """Answer until the other side is gone; an exception is told, and ends the worker."""
    setup = json.loads(frames.receive(channel) or b"{}")
    if not setup:
        return
    module, _, name = setup["target"].partition(":")
    function = getattr(sys.modules[module], name)
    if setup["memory_mb"] is not None:
        _limit_memory(setup["memory_mb"] << 20)
    tell(channel, {"ready": True})
    while (request := frames.receive(channel)) is not None:
        try:
            answer = {"answer": function(json.loads(request))}
        except Exception as error:  # noqa: BLE001  (told, and the process ends)
            tell(channel, {"raised": f"{type(error).__name__}: {error}"})
            return
        tell(channel, answer)


def _limit_memory(size: int) -> None:
    import resource

    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        wanted = size + _present()
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard < 0 else min(wanted, hard), hard))


def _present() -> int:
    """Bytes of address space that this process has now; 0 where that is not told."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return 0
