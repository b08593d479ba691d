"""What this process is doing, and how long it has waited for the others.

A wait that passes the deadline ends the run: the stacks of all processes of this machine go to stderr
first, since the one that hangs cannot speak for itself. Work that a process does alone (a rollout, a
reward) is no wait, however long it takes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from posttune.errors import Interrupted, RunError
from posttune.failure import FILE, LAUNCHED, STATUS, describe, is_late, late, record

GRACE_S = 3.0  # a group's own deadline comes first where it has one
_BETWEEN_S = 0.3  # stacks of one process after the other


@dataclass(frozen=True)
class Place:
    """Where a process runs."""

    host: str
    pid: int


@dataclass
class _Now:
    stage: str = ""
    doing: list[str] = field(default_factory=list)
    waits: list[tuple[str, float]] = field(default_factory=list)  # for what, since when
    file: int | None = None


@dataclass(frozen=True)
class _Dog:
    stop: threading.Event
    thread: threading.Thread


@dataclass(frozen=True)
class _Company:
    """All processes, and which of them this one is."""

    places: Sequence[Place] = ()
    rank: int = 0


_now = _Now()
_dogs: list[_Dog] = []
_company: list[_Company] = []


def here() -> Place:
    """Where this process runs."""
    return Place(socket.gethostname(), os.getpid())


@contextmanager
def stage(name: str) -> Iterator[None]:
    """The stage of the run that the block is."""
    before, _now.stage = _now.stage, name
    _tell()
    yield  # an error leaves it as it is, for whoever asks where it happened
    _now.stage = before
    _tell()


@contextmanager
def doing(what: str) -> Iterator[None]:
    """The part of a step that the block is."""
    _now.doing.append(what)
    _tell()
    yield  # likewise
    _now.doing.remove(what)
    _tell()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """The block waits for other processes, at most until the deadline. Raises RunError where they fail it."""
    entry = (what, time.monotonic())
    _now.waits.append(entry)
    try:
        yield
    except RuntimeError as error:
        seconds = time.monotonic() - entry[1]
        fix = "the first error of another process is the cause; where all are alive, see their stacks"
        said = str(error).partition("\n")[0].rpartition("] ")[2]  # without the place in gloo's source
        raise RunError(f"gave up waiting for {what} after {seconds:.0f} s: {said}", fix=fix) from error
    finally:
        _now.waits.remove(entry)


def where() -> str:
    """Stage and part of the step, for a message; empty outside of stages."""
    inner = f", in {_now.doing[-1]}" if _now.doing else ""
    return f"stage {_now.stage!r}{inner}" if _now.stage else ""


def _tell() -> None:
    folder = os.environ.get(STATUS)
    if folder is None:
        return
    if _now.file is None:
        name = Path(folder) / os.environ.get("RANK", "0")
        _now.file = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    os.pwrite(_now.file, where().encode()[:200].ljust(200), 0)


def start(places: Sequence[Place], rank: int, deadline_s: float) -> None:
    """Watch this process's waits from a thread. ``places``: of all processes, by rank."""
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or 2, all_threads=True)
    stop()
    _company.append(_Company(list(places), rank))
    event = threading.Event()
    thread = threading.Thread(target=_watch, args=(event, deadline_s), name="posttune-watch", daemon=True)
    _dogs.append(_Dog(event, thread))
    thread.start()


def stop() -> None:
    """Watch no longer."""
    _company.clear()
    while _dogs:
        dog = _dogs.pop()
        dog.stop.set()
        dog.thread.join()


def _watch(event: threading.Event, deadline_s: float) -> None:
    parent = os.getppid()
    while not event.wait(min(1.0, deadline_s / 4)):
        if LAUNCHED in os.environ and os.getppid() != parent:  # the launcher was killed: nobody waits for us
            os._exit(1)
        overdue = [what for what, since in _now.waits[:1] if time.monotonic() - since > deadline_s + GRACE_S]
        if overdue:
            _end(f"waited over {deadline_s:g} s for {overdue[0]}")


def _end(why: str) -> None:
    dump_stacks()
    record(late(why, where()))
    if LAUNCHED not in os.environ:
        os.write(2, f"posttune: error: {where()}: {why}\n".encode())
    os._exit(1)


def dump_stacks() -> None:
    """The stacks of every process of this machine, on its stderr; of several callers one does it."""
    if not _company:
        return
    places, rank = _company[-1].places, _company[-1].rank
    here = [(number, each.pid) for number, each in enumerate(places) if each.host == places[rank].host]
    claim = Path(tempfile.gettempdir()) / f"posttune-stacks-{here[0][1]}"
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        time.sleep(_BETWEEN_S * (len(here) + 1))
        return
    try:
        for number, pid in here:
            os.write(2, f"posttune: stacks of rank {number} (process {pid}):\n".encode())
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGUSR1)
            time.sleep(_BETWEEN_S)
    finally:
        claim.unlink(missing_ok=True)


@contextmanager
def recorded() -> Iterator[None]:
    """Of several processes: an error that ends the block is left for the launcher.

    Under posttune's own launcher the process then ends without a word.
    """
    try:
        yield
    except (Interrupted, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        if FILE not in os.environ:
            raise
        _end_of(error)
        if LAUNCHED not in os.environ:
            raise
        raise SystemExit(getattr(error, "exit_code", 1)) from None


def _end_of(error: BaseException) -> None:
    if is_late(error):
        dump_stacks()
    record(describe(error, where()))
