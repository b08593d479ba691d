"""A reward_model stage that is killed and resumed equals one that never stopped; two processes equal one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import preference_toy as toy
import pytest
import torch
import torch.multiprocessing as mp
from posttune.checkpoint import dcp, store
from posttune.distributed.ranks import Ranks
from posttune.errors import CheckpointError
from safetensors.torch import load_file

RUN = """
import json, sys, torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import preference_toy as toy
toy.run_stage(Path(sys.argv[2]), json.loads(sys.argv[3]))
"""
DEPENDS_ON_PACKING = {"update/padding_fraction", "update/tokens_per_row", "update/attention_waste"}


def killed_after(output: Path, fields: dict[str, Any], step: int) -> None:
    """Begin the stage in a process of its own, and SIGKILL it once the line of ``step`` is written."""
    here = str(Path(__file__).parent)
    process = subprocess.Popen([sys.executable, "-c", RUN, here, str(output), json.dumps(fields)])
    deadline = time.monotonic() + 120
    path = output / "metrics.jsonl"
    while not (path.exists() and len(path.read_text().splitlines()) >= step):
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    shapes = dcp.shapes(checkpoint / store.TENSORS)
    found = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    dcp.read_into(checkpoint / store.TENSORS, found)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_killed_and_resumed_equals_never_stopped(task: Path, tmp_path: Path, lora: bool) -> None:
    model = {"path": str(task / "model"), "lora": {"rank": 4, "dropout": 0.1} if lora else None}
    data = {"path": str(task / "data"), "limit": 40}  # 36 train: 8 steps of 8 end in the second epoch
    fields = toy.stage(task, model=model, data=data, steps=8, checkpoint={"every": 2}, holdout={"every": 3})
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    toy.run_stage(whole, fields)
    killed_after(parts, fields, 5)
    assert not (parts / "checkpoints" / "global_step_8").exists()
    toy.run_stage(parts, fields, resume=True)
    first, second = toy.metrics(whole), toy.metrics(parts)
    assert [toy.comparable(line) for line in first] == [toy.comparable(line) for line in second]
    one, two = (tensors(folder / "checkpoints" / "global_step_8") for folder in (whole, parts))
    assert one.keys() == two.keys()
    assert any(name.endswith("score.weight/exp_avg") for name in one)
    assert all(torch.equal(one[name], two[name]) for name in one)
    left = [load_file(folder / "models" / "judge" / "model.safetensors") for folder in (whole, parts)]
    assert all(torch.equal(left[0][name], left[1][name]) for name in left[0])


def test_another_split_is_another_run(task: Path, tmp_path: Path) -> None:
    toy.run_stage(tmp_path, toy.stage(task, steps=1))
    with pytest.raises(CheckpointError, match=r"holdout\.fraction: 0\.1 -> 0\.2"):
        toy.run_stage(tmp_path, toy.stage(task, steps=1, holdout={"fraction": 0.2}), resume=True)


def worker(rank: int, port: int, output: str, fields: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = Ranks.current("cpu", deadline_s=120)
    toy.run_stage(Path(output), json.loads(fields), ranks=ranks)
    ranks.close()


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@pytest.mark.slow
def test_two_processes_equal_one(task: Path, tmp_path: Path) -> None:
    smooth = {"lr": 1e-3, "eps": 1e-3}  # Adam with a small one turns rounding into a step of lr
    fields = toy.stage(task, batch_size=7, steps=3, optimizer=smooth, holdout={"every": 2})
    one, two = tmp_path / "one", tmp_path / "two"
    toy.run_stage(one, fields)
    mp.spawn(worker, args=(free_port(), str(two), json.dumps(fields)), nprocs=2)  # type: ignore[no-untyped-call]
    lines = [[toy.comparable(line) for line in toy.metrics(folder)] for folder in (one, two)]
    assert len(lines[0]) == len(lines[1]) == 3
    for first, second in zip(*lines, strict=True):
        assert first.keys() == second.keys()
        for name in first.keys() - DEPENDS_ON_PACKING - {"stage"}:
            assert second[name] == pytest.approx(first[name], rel=1e-5, abs=1e-5), name
    left = [load_file(folder / "models" / "judge" / "model.safetensors") for folder in (one, two)]
    assert all(torch.allclose(left[0][name], left[1][name], atol=1e-5) for name in left[0])
