"""What keeps a scorer that runs a model's text from doing much harm. It is no sandbox.

It holds: no network (a network namespace of its own where the kernel lets a user have one, else
Python's sockets are taken away, which code that knows C can undo), nothing can be written into a file,
bounded memory, no new processes where the kernel counts them per user, and posttune's deadline with
its kill. It does not hold: reading, emptying and deleting files with the user's rights, and reading the
environment. For that, use a container.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import socket
from typing import Any, NoReturn

from posttune.errors import UserError

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000


@functools.cache
def isolate(memory_mb: int) -> str:
    """Limit this worker process, once and for good. Returns how the network was taken: namespace or sockets.

    Raises UserError where this is no worker process of posttune, since nothing of it can be undone.
    """
    if os.environ.get("POSTTUNE_WORKER") != "process":
        what = "a denied task is scored only in a worker process"
        raise UserError(what, who="reward 'reasoning_gym'", fix="set executor: process on the reward")
    from posttune_reasoning_gym import _tasks

    _tasks.load()  # imports write caches, and need more than what is left below
    how = "namespace" if _own_network() else "sockets"
    if how == "sockets":
        _forbid_sockets()
    _limit(resource.RLIMIT_AS, memory_mb * 2**20)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_NPROC, 0)
    return how


def _own_network() -> bool:
    """Move into a network namespace with nothing in it. False where the kernel refuses."""
    try:
        return bool(ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0)
    except (OSError, AttributeError):  # no such call: macOS
        return False


def _forbid_sockets() -> None:
    def refused(*_arguments: Any, **_named: Any) -> NoReturn:
        raise PermissionError("no network here: a task's scorer that runs a model's text asked for it")

    for name in ("socket", "create_connection", "socketpair", "getaddrinfo"):
        setattr(socket, name, refused)


def _limit(which: int, most: int) -> None:
    _, hard = resource.getrlimit(which)
    least = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (least, least))
