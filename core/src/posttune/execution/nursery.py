"""A process of our own that worker processes are forked from, in milliseconds each.

It is a fresh interpreter, single-threaded, that never sees the user's ``__main__``: scripts without a
main guard, notebooks and ``python -`` work. When its owner ends, however it ends, so do all workers.
Needs POSIX. No sandbox: a worker has its user's rights.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

# The user's folders come last until all is imported: a resource.py of theirs is not ours.
_START = (
    "import sys; at = sys.argv.index('--'); sys.path.extend(sys.argv[at + 1:]); "
    "from posttune.execution.forking import main; "
    "main(int(sys.argv[1]), sys.argv[2], sys.argv[3:at], sys.argv[at + 1:])"
)


class Nursery:
    """The process that forks workers. It ends them and itself when this object, or this process, ends."""

    def __init__(self, entry: str, preload: Sequence[str]) -> None:
        """``entry`` is ``module:function``, called with a worker's socket; ``preload`` is imported before."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, str(theirs.fileno()), entry, *preload, "--", *_paths()],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,  # Ctrl-C is for the owner, which then closes its pools
            )
        self._control = ours
        self.close = weakref.finalize(self, _end, ours, self._process, os.getpid())

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def fork(self) -> socket.socket:
        """A socket whose other end a new worker has."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):  # that it has ended is seen by ``alive``
            socket.send_fds(self._control, [b"f"], [theirs.fileno()])
        return ours


def _end(control: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    control.close()
    if os.getpid() != owner:
        process.returncode = 0  # a fork of the owner: not its process to end
        return
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _paths() -> list[str]:
    """Where this process finds modules, as the worker is to find them."""
    return [str(Path(place).absolute()) if place else str(Path.cwd()) for place in sys.path]
