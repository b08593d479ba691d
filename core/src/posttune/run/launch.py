"""Starts the processes of a run on this machine, through torch's elastic launcher, and speaks for them."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from posttune.errors import PosttuneError, RunError
from posttune.failure import LAUNCHED, STATUS, read_records, rebuilt
from posttune.run.keeper import Keeper

SHUTDOWN_SECONDS = 10
"""Time that the other processes have to end once one has failed."""

_QUIET = (2, 130)  # a command line that cannot be; an interrupt: what there is to say has been said


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run ``posttune ARGUMENTS`` in several processes; 0, or 130 where they were interrupted.

    Raises the error of the first to fail, which names its rank and stage.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # this module speaks
    _share_cores(processes)
    keeper = Keeper(processes, SHUTDOWN_SECONDS)
    with tempfile.TemporaryDirectory(prefix="posttune-") as status, _forwarded_signals():
        os.environ |= {STATUS: status, LAUNCHED: "1"}
        try:
            with keeper.watching():
                elastic_launch(_settings(processes), sys.executable)("-m", "posttune", *arguments)
        except ChildFailedError as error:
            return _answer(error.failures, keeper.first, Path(status), processes)
        finally:
            del os.environ[STATUS], os.environ[LAUNCHED]
    return 0


def _settings(processes: int) -> Any:
    from torch.distributed.launcher.api import LaunchConfig

    wanted: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": processes,
        "run_id": f"posttune-{os.getpid()}",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "max_restarts": 0,
        "signals_to_handle": "SIGHUP,SIGQUIT",
        "shutdown_timeout": SHUTDOWN_SECONDS,
    }
    known = inspect.signature(LaunchConfig).parameters
    return LaunchConfig(**{key: value for key, value in wanted.items() if key in known})


def _share_cores(processes: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))


@contextlib.contextmanager
def _forwarded_signals() -> Iterator[None]:
    """Hand Ctrl-C and SIGTERM to the processes: each ends its step, and all write one checkpoint.

    The launcher's own answer would be to kill them after some seconds.
    """
    before = {number: signal.signal(number, _forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _forward(_number: int, _frame: FrameType | None) -> None:
    import psutil

    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(signal.SIGINT)


def _answer(failures: Mapping[int, Any], first: int | None, status: Path, processes: int) -> int:
    """The exit code of an interrupt; else the error of the process that failed first is raised."""
    records = read_records(status)
    rank = _cause(failures, records, first)
    if rank not in records:
        code = int(failures[rank].exitcode)
        if code in _QUIET:
            return code
        raise _ended(rank, code, _doing(status, rank))
    found = records[rank]
    if found["traceback"]:
        sys.stderr.write(f"posttune: traceback of rank {rank}:\n{found['traceback']}")
    raise _with_others(rebuilt(found, rank), found, rank, status, processes)


def _cause(failures: Mapping[int, Any], records: Mapping[int, Mapping[str, Any]], first: int | None) -> int:
    """Who failed first: one that was gone without a word, then the first whose error was no echo."""
    silent = [
        rank for rank in failures if rank == first and rank not in records and not _follows(failures[rank])
    ]
    by_time = sorted(records, key=lambda rank: float(records[rank]["time"]))
    own = [rank for rank in by_time if not records[rank]["echo"]]
    return [*silent, *own, *by_time, *failures][0]


def _follows(failure: Any) -> bool:
    """Whether a process may have ended so because another one did."""
    return failure.exitcode in (*_QUIET, -signal.SIGTERM, -signal.SIGABRT)


def _doing(status: Path, rank: int) -> str:
    with contextlib.suppress(OSError):
        return (status / str(rank)).read_text("utf-8").strip()
    return ""


def _ended(rank: int, code: int, where: str) -> RunError:
    who = f"rank {rank}" + (f", {where}" if where else "")
    if code >= 0:
        return RunError(f"ended with exit code {code} and left no error", who=who, fix="see its output")
    name = signal.Signals(-code).name
    fix = "see its output"
    if name == "SIGKILL":
        fix = "where nobody killed it, the machine's memory ran out: see dmesg, and posttune plan"
    return RunError(f"was ended by signal {name}", who=who, fix=fix)


def _with_others(
    error: PosttuneError, found: Mapping[str, Any], rank: int, status: Path, processes: int
) -> PosttuneError:
    """Where one waited too long: what the others were doing, one of whom is the cause."""
    if not found["late"]:
        return error
    others = [
        f"\n    rank {other}: {_doing(status, other) or 'before its first stage'}"
        for other in range(processes)
        if other != rank
    ]
    return type(error)(f"{error.what}; meanwhile{''.join(others)}", who=error.who, fix=error.fix)
