"""Asks Ray for processes, and runs ``posttune`` in each of them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttune.errors import RunError, UserError

INSTALL = 'pip install "posttune-ray[engine]"'


@dataclass(frozen=True)
class Wanted:
    """What is asked of the cluster."""

    processes: int
    cpus: float = 1  # of each process
    gpus: float = 0  # likewise
    address: str | None = None  # of a cluster that runs


def launch(arguments: Sequence[str], wanted: Wanted) -> None:
    """Run ``posttune ARGUMENTS`` in processes that Ray Train places. Returns when all have ended well.

    Raises UserError where ray is not installed, the cluster is too small or the configuration is wrong,
    and RunError with the last words of the process that failed first.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError("ray is not installed", fix=INSTALL)
    _check(arguments, wanted.processes)
    import ray

    _connect(wanted)
    try:
        _refuse_small(ray.cluster_resources(), wanted)
        _fit(arguments, wanted)
    finally:
        ray.shutdown()


def _check(arguments: Sequence[str], processes: int) -> None:
    """Let posttune look at the configuration before the cluster is asked for anything."""
    command = [sys.executable, "-m", "posttune", *arguments, "--dry-run", "--nproc", str(processes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().removeprefix("posttune: error: ") or done.stdout.strip()
        raise UserError(said, who="posttune run --dry-run", fix="mend it, then start again")


def _connect(wanted: Wanted) -> None:
    import ray

    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    try:
        ray.init(address=wanted.address, log_to_driver=True, logging_level="WARNING")
    except Exception as error:  # ray raises plain ones too
        where = wanted.address or os.environ.get("RAY_ADDRESS")
        if where is None:
            fix = "see what ray wrote to /tmp/ray/session_latest/logs; on a busy machine, start it before"
            raise RunError(f"did not start here: {error}", who="ray", fix=fix) from error
        fix = "start one with ray start --head, and give its address"
        raise UserError(f"no cluster answers: {error}", who=f"ray at {where}", fix=fix) from error


def _refuse_small(there: Mapping[str, float], wanted: Wanted) -> None:
    """Ray would wait for what never comes."""
    for name, each in (("CPU", wanted.cpus), ("GPU", wanted.gpus)):
        need, have = each * wanted.processes, there.get(name, 0)
        if need > have:
            raise UserError(
                f"{wanted.processes} processes of {each:g} {name} need {need:g}, it has {have:g}",
                who="the cluster",
                fix="lower --nproc, --cpus or --gpus, or add nodes",
            )


def _fit(arguments: Sequence[str], wanted: Wanted) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from posttune_ray.worker import work

    resources = {"CPU": wanted.cpus, **({"GPU": wanted.gpus} if wanted.gpus else {})}
    config = {"arguments": list(arguments), "folder": str(Path.cwd()), "gpus": wanted.gpus}
    with tempfile.TemporaryDirectory(prefix=".posttune-ray-", dir=Path.cwd()) as storage:
        trainer = DataParallelTrainer(
            work,
            train_loop_config=config,
            scaling_config=ScalingConfig(
                num_workers=wanted.processes, use_gpu=wanted.gpus > 0, resources_per_worker=resources
            ),
            run_config=RunConfig(
                storage_path=storage, name="run", failure_config=FailureConfig(max_failures=0)
            ),
        )
        try:
            trainer.fit()
        except WorkerGroupError as error:
            raise first_failure(error.worker_failures) from error


def first_failure(failures: Mapping[int, Any]) -> RunError:
    """Of the processes that failed, the one whose own error was the first; others are but its echo."""
    told = [(rank, words_of(failure)) for rank, failure in sorted(failures.items())]
    own = [(rank, words) for rank, words in told if not _echo(words)]
    rank, words = (own or told)[0]
    fix = "posttune-ray run ... --resume goes on from the last checkpoint"
    return RunError(words, who=f"rank {rank}", fix=fix)


def words_of(failure: object) -> str:
    """The words of the worker itself: Ray wraps them in the traceback of its own calls."""
    cause = getattr(failure, "cause", None)
    return str(cause if cause is not None else failure).strip()


def _echo(words: str) -> bool:
    signs = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Connection was likely closed",
        "ended by another",
    )
    return any(sign in words for sign in signs)
