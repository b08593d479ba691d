"""What runs on the cluster: one process of posttune for each worker of Ray Train.

It is a process of its own, because a worker's function runs in a thread, where no signal can be handled.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LAST_LINES = 40
_PR_SET_PDEATHSIG = 1


class ProcessFailedError(RuntimeError):
    """A process of posttune ended with an error; its last words are the text."""


def work(config: dict[str, Any]) -> None:
    """Run ``posttune`` as one of the processes of the run. Raises ProcessFailedError."""
    from ray.train import get_context
    from ray.train.collective import broadcast_from_rank_zero

    context = get_context()
    rank = context.get_world_rank()
    meeting = broadcast_from_rank_zero(_meeting_point() if rank == 0 else None)
    environment = variables(
        meeting, rank, context.get_world_size(), context.get_local_rank(), gpus=config["gpus"]
    )
    run_process([sys.executable, "-m", "posttune", *config["arguments"]], environment, config["folder"])


def variables(
    meeting: tuple[str, int], rank: int, world: int, local_rank: int, *, gpus: float
) -> dict[str, str]:
    """What a launcher sets. Ray shows a process its own GPUs alone, so that they count from 0."""
    return {
        "MASTER_ADDR": meeting[0],
        "MASTER_PORT": str(meeting[1]),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0" if gpus else str(local_rank),
    }


def _meeting_point() -> tuple[str, int]:
    """This node's address, and a port that is free on it."""
    from ray.util import get_node_ip_address

    with socket.socket() as server:
        server.bind(("", 0))
        return get_node_ip_address(), int(server.getsockname()[1])


def run_process(command: list[str], environment: Mapping[str, str], folder: str) -> None:
    """Run it to its end, its output passed on. It does not outlive this process."""
    if not Path(folder).is_dir():
        what = f"{socket.gethostname()} has no folder {folder}; all nodes must see it under the same path"
        raise ProcessFailedError(what)
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=_die_with_parent if sys.platform == "linux" else None,
    )
    last: deque[str] = deque(maxlen=LAST_LINES)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            last.append(line)
            sys.stdout.write(line)
            sys.stdout.flush()
        code = process.wait()
    finally:
        process.kill()
        process.wait()
    if code:
        raise ProcessFailedError(f"{_how(code)}\n{''.join(last)}".strip())


def _how(code: int) -> str:
    return f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
