"""Starts the processes of a run on this machine, through torch's elastic launcher."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from posttune.errors import UserError

SHUTDOWN_SECONDS = 20
"""Time that the other processes have to end once one has failed."""


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run ``posttune ARGUMENTS`` in several processes. Returns the exit code of the first to fail, or 0."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks speak themselves
    _share_cores(processes)
    with _forwarded_signals():
        try:
            elastic_launch(_settings(processes), sys.executable)("-m", "posttune", *arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return _exit_code(rank, failure.exitcode)
    return 0


def check_count(processes: int) -> None:
    """Raise UserError for a number of processes that cannot be meant."""
    if processes < 1:
        raise UserError(f"{processes} processes", who="--nproc", fix="give 1 or more")


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


def _exit_code(rank: int, code: int) -> int:
    if code in (1, 2, 130):
        return code
    cause = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    sys.stderr.write(f"posttune: error: rank {rank} was ended {cause}\n")
    return 1
