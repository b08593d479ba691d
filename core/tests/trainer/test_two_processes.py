"""The loop with two gloo processes gives what one gives: loss, metrics, weights, samples."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import trainer_toy as toy
from posttune.distributed.ranks import Ranks
from safetensors.torch import load_file

TOLERANCE = 1e-5
DEPENDS_ON_PACKING = {"update/padding_fraction", "update/tokens_per_row", "update/attention_waste"}


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def worker(rank: int, port: int, jobs: list[tuple[str, str]]) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = Ranks.current("cpu", deadline_s=120)
    for output, stage in jobs:
        toy.run_stage(Path(output), json.loads(stage), ranks=ranks)
    ranks.close()


def run_two(jobs: list[tuple[Path, dict[str, Any]]]) -> None:
    plain = [(str(output), json.dumps(stage)) for output, stage in jobs]
    mp.spawn(worker, args=(free_port(), plain), nprocs=2)  # type: ignore[no-untyped-call]


def stages(task: Path) -> dict[str, dict[str, Any]]:
    """What is compared. An odd number of rows and prompts, so that the shares differ."""
    answered = {"name": "function", "options": {"path": f"{task / 'rewards.py'}:seen"}}
    validation = {
        "every": 2,
        "data": {"path": str(task / "data"), "limit": 7},
        "rewards": [answered],
        "sampling": {"temperature": 0.0, "max_new_tokens": 3},
    }
    batch = {"prompts": 5, "mini_batches": 2}
    lora = {"path": str(task / "model"), "lora": {"rank": 4}}
    smooth = {"eps": 1e-3}  # Adam with a small one turns the rounding of a tiny gradient into a step of lr
    made = {
        "sft": toy.sft(task, batch_size=7, evaluate=validation),
        "rl": toy.rl(
            task, batch=batch, kl={"where": "loss", "coef": 0.1, "target": 0.01}, evaluate=validation
        ),
        "rl-batch": toy.rl(task, batch=batch, advantage={"name": "reinforce_plus_plus"}),
        "rl-lora": toy.rl(
            task, model=lora, batch={"prompts": 3}, kl={"where": "reward"}, advantage={"name": "rloo"}
        ),
        "rl-critic": toy.rl(
            task,
            batch=batch,
            advantage={"name": "gae"},
            critic={"optimizer": smooth | {"lr": 1e-3}, "warmup_steps": 1},
            mismatch={"correction": "truncated_token", "alarm": 0.1},
        ),
        "rl-dynamic": toy.rl(
            task,
            batch=batch,
            rewards=[{"name": "function", "options": {"path": f"{task / 'rewards.py'}:rare"}}],
            dynamic_sampling={"max_refills": 2},
            alarms={"reward_std_below": 0.5},
        ),
    }
    return {name: toy.merged(stage, {"optimizer": smooth}) for name, stage in made.items()}


@pytest.mark.slow
def test_two_processes_equal_one(task: Path, tmp_path: Path) -> None:
    jobs = stages(task)
    run_two([(tmp_path / f"{name}-2", stage) for name, stage in jobs.items()])
    for name, stage in jobs.items():
        one, two = tmp_path / f"{name}-1", tmp_path / f"{name}-2"
        toy.run_stage(one, stage)
        assert_equal_metrics(one, two)
        assert_equal_rollouts(one, two)
        assert_equal_models(one / "models" / stage["kind"], two / "models" / stage["kind"])


def assert_equal_metrics(one: Path, two: Path) -> None:
    first, second = toy.metrics(one), toy.metrics(two)
    assert len(first) == len(second) == 3
    for line, other in zip(first, second, strict=True):
        found = toy.comparable(line)
        assert found.keys() == toy.comparable(other).keys()
        for name in found.keys() - DEPENDS_ON_PACKING - {"stage"}:
            assert other[name] == pytest.approx(found[name], rel=TOLERANCE, abs=TOLERANCE), name


def assert_equal_rollouts(one: Path, two: Path) -> None:
    tables, others = toy.rollouts(one), toy.rollouts(two)
    assert list(tables) == list(others)
    for name, table in tables.items():
        same = ["step", "prompt_id", "completion_ids", "finish_reason", "weight_version", "reward"]
        # refills of several ranks come in the order of the ranks
        table, other = (each.sort_by([("prompt_id", "ascending")]) for each in (table, others[name]))
        assert table.select(same).equals(other.select(same))
        for column in ("advantage", "logprobs"):
            values = [
                torch.tensor(each.column(column).combine_chunks().flatten().to_numpy())
                for each in (table, other)
            ]
            assert torch.allclose(*values, atol=1e-4), column


def assert_equal_models(one: Path, two: Path) -> None:
    tensors, others = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.allclose(tensor, others[name], atol=TOLERANCE), name


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_resumes_with_one(task: Path, tmp_path: Path) -> None:
    stage = toy.sft(task, steps=4, batch_size=7, checkpoint={"every": 2})
    toy.run_stage(tmp_path / "whole", stage)
    run_two([(tmp_path / "parts", stage)])
    last = tmp_path / "parts" / "checkpoints" / "global_step_4"
    last.rename(tmp_path / "put aside")
    toy.run_stage(tmp_path / "parts", stage, resume=True)
    assert_losses(tmp_path / "whole", tmp_path / "parts")


def assert_losses(one: Path, other: Path) -> None:
    losses = [[line["loss"] for line in toy.metrics(folder)] for folder in (one, other)]
    assert losses[1] == pytest.approx(losses[0], rel=TOLERANCE)
