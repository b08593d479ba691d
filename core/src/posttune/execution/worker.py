"""``python -m posttune.execution.worker FD``: the process that rewards' workers are forked from.

It is a fresh interpreter, single-threaded, that has never seen the user's ``__main__``. It imports
posttune once and, for each socket that the pool sends it, forks a worker, which takes milliseconds. A
worker composes its reward anew from name and options, says so, and answers one call after another. What
a reward prints goes to stderr. When the pool's process ends, however it ends, so do all workers.
Requests are pickles of samples, read from the pool's own socket; answers are JSON.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from posttune.errors import PosttuneError
from posttune.execution import frames
from posttune.execution.remote_errors import pack_error

if TYPE_CHECKING:
    from posttune.execution.outcome import Call

REAP_EVERY = 0.5  # seconds
WORKER = "POSTTUNE_WORKER"


def main(descriptor: int) -> None:
    """Fork workers until the other end of the socket is closed, then end those that are left."""
    import posttune.facade
    import posttune.reward.loading  # noqa: F401  (once, here, rather than in every worker)
    from posttune.metadata import keep_listing

    keep_listing()
    control = socket.socket(fileno=descriptor)
    children: set[int] = set()
    os.dup2(2, 1)
    gc.freeze()
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
            _become_worker(socket.socket(fileno=descriptors[0]))
        os.close(descriptors[0])
        children.add(pid)
    for pid in children:
        if not _ended(pid):
            _kill(pid)


def _ended(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG)[0] != 0


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # before it had a group of its own
        os.kill(pid, signal.SIGKILL)


def _become_worker(channel: socket.socket) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)  # what a reward starts is killed with it
        _tell(channel, {"pid": os.getpid()})
        _serve(channel)
        code = 0
    except BaseException:  # noqa: BLE001  (the process ends)
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _serve(channel: socket.socket) -> None:
    setup = frames.receive(channel)
    if setup is None:
        return
    try:
        call = _composed(json.loads(setup))
    except PosttuneError as error:
        _tell(channel, {"failed": pack_error(error)})
        return
    _tell(channel, {"ready": True})
    while (request := frames.receive(channel)) is not None:
        began = time.monotonic()
        answer = _answer(call, request)
        _tell(channel, answer | {"seconds": time.monotonic() - began})


def _composed(setup: dict[str, Any]) -> Call:
    """The reward, made from its configuration as any other process makes it."""
    from posttune.config.base import PluginRef
    from posttune.facade.rewards import RewardCall
    from posttune.pipeline import compose
    from posttune.reward.loading import also_look_in, refuse_file

    for folder in setup["folders"]:
        also_look_in(Path(folder))
    if setup["main"]:
        refuse_file(Path(setup["main"]))
    if setup["memory_mb"] is not None:
        limit = setup["memory_mb"] * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ[WORKER] = "process"  # tells a reward that asks to be isolated that it is
    (member,) = compose("reward", [PluginRef(**setup["ref"])])
    call = RewardCall(member)
    call.needs()  # loads a function given by path
    return call


def _answer(call: Call, request: bytes) -> dict[str, Any]:
    try:
        checked = call(pickle.loads(request))  # noqa: S301  (the pool wrote it)
    except PosttuneError as error:
        return {"error": pack_error(error)}
    return {"scores": list(checked.scores), "nan": checked.nan}


def _tell(channel: socket.socket, message: dict[str, Any]) -> None:
    frames.send(channel, json.dumps(message).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
