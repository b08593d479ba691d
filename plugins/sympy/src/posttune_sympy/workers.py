"""SymPy in processes of their own, which can be killed.

A thread cannot be stopped, so whatever SymPy may take long over runs elsewhere. One process, the nursery
(``python -c "...posttune_sympy._nursery..."``), imports SymPy once and never computes; it forks a worker
in milliseconds when one is asked for, kills one that overran, and ends all of them when this process
ends, however it ends. Requests and answers are lines of JSON; no objects, and neither the
nursery nor a worker imports the caller's ``__main__``. Needs POSIX.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttune.errors import RunError

MIN_WORKERS = 8  # so that a few that hang hold up nobody; a worker costs little memory
START_LIMIT = 120.0  # seconds that importing SymPy may take
COMMAND = struct.Struct(
    "<i"
)  # to the nursery: 0 forks a worker for the socket sent along, else a pid to kill
_START = "import sys; sys.path.extend(sys.argv[1:]); from posttune_sympy._nursery import main; main()"
_log = logging.getLogger(__name__)


class OutOfTime(Exception):
    """The worker overran its limit and was killed."""


class WorkerDied(Exception):
    """The worker ended without an answer: out of memory, or an error of SymPy's."""


@dataclass
class Worker:
    """One process that answers requests, one after the other."""

    pid: int
    channel: socket.socket

    def ask(self, request: dict[str, Any], limit: float) -> Any:
        """The answer. Raises OutOfTime and WorkerDied; the worker is of no use after either."""
        deadline = time.monotonic() + limit
        try:
            self.channel.settimeout(limit)
            self.channel.sendall(json.dumps(request).encode() + b"\n")
            return json.loads(_line(self.channel, deadline))
        except TimeoutError as error:
            raise OutOfTime from error
        except OSError as error:
            raise WorkerDied from error

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


class Pool:
    """Workers by need, at most ``size`` at a time. Safe to use from any thread."""

    def __init__(self, size: int) -> None:
        self._free: list[Worker] = []
        self._slots = threading.Semaphore(size)
        self._lock = threading.Lock()
        self._nursery: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def ask(self, request: dict[str, Any], limit: float) -> tuple[Any, float]:
        """The answer of a free worker within ``limit`` seconds of its work, and the seconds it took.

        Waiting for a free worker, which is as short as the limit of those at work, does not count.
        Raises OutOfTime, WorkerDied, and RunError where no worker can be started.
        """
        with self._slots:
            worker = self._idle()
            if worker is not None:
                try:
                    return self._asked(worker, request, limit)
                except WorkerDied:
                    _log.debug("an idle worker died; a new one is asked")
            return self._asked(self._new(), request, limit)

    def _asked(self, worker: Worker, request: dict[str, Any], limit: float) -> tuple[Any, float]:
        began = time.monotonic()
        try:
            answer = worker.ask(request, limit)
        except BaseException:
            self._end(worker)
            raise
        with self._lock:
            self._free.append(worker)
        return answer, time.monotonic() - began

    def close(self) -> None:
        """End the nursery and all workers."""
        with self._lock:
            self._close()

    def forget(self) -> None:
        """Close this process's ends only: after a fork they belong to the parent."""
        for channel in [self._control, *(worker.channel for worker in self._free)]:
            if channel is not None:
                channel.close()
        if self._nursery is not None:
            self._nursery.returncode = 0  # not this process's child

    def _idle(self) -> Worker | None:
        with self._lock:
            while self._free:
                worker = self._free.pop()
                if worker.waits():
                    return worker
                worker.channel.close()
        return None

    def _new(self) -> Worker:
        with self._lock:
            try:
                return self._hatched()
            except OSError:
                self._close()  # somebody killed the nursery
            try:
                return self._hatched()
            except OSError as error:
                raise _no_worker(f"it could not be reached: {error}") from error

    def _hatched(self) -> Worker:
        if self._control is None:
            self._start()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [COMMAND.pack(0)], [theirs.fileno()])
        ours.settimeout(START_LIMIT)
        try:
            pid = json.loads(_line(ours, time.monotonic() + START_LIMIT))
        except OSError:
            ours.close()
            raise
        if not isinstance(pid, int):
            ours.close()
            raise _no_worker(str(pid))
        return Worker(pid, ours)

    def _start(self) -> None:
        if not hasattr(os, "fork"):
            raise _no_worker("this system cannot fork")
        ours, theirs = socket.socketpair()
        paths = [str(Path(__file__).parents[1]), *(str(Path(path).absolute()) for path in sys.path if path)]
        with theirs:
            self._nursery = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, *paths],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is this process's
            )
        self._control = ours

    def _end(self, worker: Worker) -> None:
        worker.channel.close()
        with self._lock:
            try:
                if self._control is not None:
                    self._control.sendall(COMMAND.pack(worker.pid))
            except OSError:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)

    def _close(self) -> None:
        for worker in self._free:
            worker.channel.close()
        self._free.clear()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._nursery is not None:
            try:
                self._nursery.wait(5)
            except subprocess.TimeoutExpired:
                self._nursery.kill()
                self._nursery.wait()
            self._nursery = None


def _line(channel: socket.socket, deadline: float) -> bytes:
    """One line. Raises TimeoutError, and OSError where the other side is gone."""
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        channel.settimeout(max(deadline - time.monotonic(), 0.001))
        part = channel.recv(65536)
        if not part:
            raise ConnectionResetError("the other side is gone")
        parts.append(part)
    return b"".join(parts)


def _no_worker(what: str) -> RunError:
    return RunError(
        f"no SymPy worker: {what}",
        who="reward 'sympy_math'",
        fix="check that `python -c 'import sympy'` works in this environment, on Linux or macOS",
    )


_pool: Pool | None = None
_pool_lock = threading.Lock()


def pool() -> Pool:
    """The workers of this process, started when they are first asked."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = Pool(max(MIN_WORKERS, os.cpu_count() or 0))
        return _pool


def _close_pool() -> None:
    global _pool
    with _pool_lock:
        if _pool is not None:
            _pool.close()
            _pool = None


def _after_fork() -> None:
    global _pool, _pool_lock
    _pool_lock = threading.Lock()
    if _pool is not None:
        _pool.forget()
        _pool = None


atexit.register(_close_pool)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
