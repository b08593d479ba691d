"""What the nursery runs (see ``posttune.execution.nursery``): it imports, forks, reaps, and computes nothing.

For each socket that it is sent it forks a worker, which tells its pid and hands the socket to the entry.
What a worker prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from posttune.execution.frames import tell

REAP_EVERY = 0.5  # seconds
WORKER = "POSTTUNE_WORKER"  # in a worker's environment: what asks to be isolated sees that it is

Entry = Callable[[socket.socket], None]


def main(descriptor: int, entry: str, preload: Sequence[str], paths: Sequence[str]) -> None:
    """Fork workers until the other end of the socket is closed, then end those that are left."""
    control = socket.socket(fileno=descriptor)
    run = _loaded(entry, preload)
    sys.path[:] = paths  # from here on as the owner has it
    os.dup2(2, 1)
    gc.freeze()
    children: set[int] = set()
    while True:
        ready, _, _ = select.select([control], [], [], REAP_EVERY)
        children -= {pid for pid in children if _ended(pid)}
        if not ready:
            continue
        order, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not order:
            break
        pid = os.fork()
        if pid == 0:
            control.close()
            _become_worker(socket.socket(fileno=descriptors[0]), run)
        os.close(descriptors[0])
        children.add(pid)
    for pid in children:
        if not _ended(pid):
            _kill(pid)


def _loaded(entry: str, preload: Sequence[str]) -> Entry:
    """The entry; where something cannot be imported, one that says so to whoever asks for a worker."""
    module, _, name = entry.partition(":")
    try:
        for each in preload:
            importlib.import_module(each)
        found: Entry = getattr(importlib.import_module(module), name)
    except ImportError as error:
        reason = f"{type(error).__name__}: {error}"
        return lambda channel: tell(channel, {"unavailable": reason})
    return found


def _ended(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG)[0] != 0


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # before it had a group of its own
        os.kill(pid, signal.SIGKILL)


def _become_worker(channel: socket.socket, run: Entry) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)  # what a worker starts is killed with it
        os.environ[WORKER] = "process"
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        tell(channel, {"pid": os.getpid()})
        run(channel)
        code = 0
    except BaseException:  # noqa: BLE001  (the process ends)
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)
