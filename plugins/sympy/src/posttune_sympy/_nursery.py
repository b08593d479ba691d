"""The process that forks workers and kills them. It imports SymPy and computes nothing itself.

Its standard input is a socket: a command of four bytes forks a worker for the socket sent along with it,
or kills the worker whose pid it holds. When the other side is gone it kills all workers and ends.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path

from posttune_sympy.workers import COMMAND

MEMORY = 2 << 30  # bytes that a worker may take beyond what it starts with
RECURSION = 4_000


def main() -> None:
    """Serve until the other side is gone."""
    control = socket.socket(fileno=0)
    try:
        from posttune_sympy import _symbolic  # noqa: F401
    except ImportError as error:
        _refuse(control, f"{type(error).__name__}: {error}")
        return
    gc.freeze()
    workers: set[int] = set()
    signal.signal(signal.SIGCHLD, lambda *_: _reap(workers))
    while True:
        data, sent, _, _ = socket.recv_fds(control, COMMAND.size, 1)
        if not data:
            break
        (pid,) = COMMAND.unpack(data)
        if pid:
            _kill(pid, workers)
        elif sent:
            _fork(control, sent[0], workers)
    for pid in set(workers):
        _kill(pid, workers)


def _fork(control: socket.socket, sent: int, workers: set[int]) -> None:
    pid = os.fork()
    if pid:
        workers.add(pid)
        os.close(sent)
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    control.close()
    status = 1
    try:
        _serve(socket.socket(fileno=sent))
        status = 0
    finally:
        os._exit(status)


def _serve(channel: socket.socket) -> None:
    """Answer requests until the other side is gone. An error of SymPy's ends the worker, silently."""
    from posttune_sympy._symbolic import answer

    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    _limit_memory()
    sys.setrecursionlimit(RECURSION)
    with channel, channel.makefile("rb") as requests:
        channel.sendall(json.dumps(os.getpid()).encode() + b"\n")
        for line in requests:
            channel.sendall(json.dumps(answer(json.loads(line))).encode() + b"\n")


def _limit_memory() -> None:
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        wanted = MEMORY + _size()
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard < 0 else min(wanted, hard), hard))


def _size() -> int:
    """Bytes of address space that this process has now; 0 where that is not told."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return 0


def _kill(pid: int, workers: set[int]) -> None:
    if pid in workers:  # those are not reaped yet, so the pid is still theirs
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _reap(workers: set[int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            workers.discard(pid)


def _refuse(control: socket.socket, reason: str) -> None:
    """Tell whoever asks that there will be no worker."""
    while True:
        data, sent, _, _ = socket.recv_fds(control, COMMAND.size, 1)
        if not data:
            return
        for each in sent:
            with socket.socket(fileno=each) as channel:
                channel.sendall(json.dumps(reason).encode() + b"\n")
