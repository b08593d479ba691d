"""What is learnt does not depend on how the work is cut up: processes, micro-batches, rows, recomputation,
attention. Every kind of loss, with the samples of one run fed to all others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trainer_toy as toy
from ranks_toy import SMOOTH, Job, assert_equal_runs, run_alone, run_ranks

KINDS = ("sft", "grpo", "dr_grpo", "gspo", "ppo")
"""Means over tokens, of sequences, over a fixed length, ratios of whole sequences, and a critic."""

ONE_PROCESS: dict[str, dict[str, Any]] = {
    "micro-batches of one sequence": {"packing": {"micro_batch_tokens": 1}},
    "micro-batches of a few": {"packing": {"micro_batch_tokens": 48}},
    "rows of many sequences": {"packing": {"row_tokens": 64, "micro_batch_tokens": 128}},
    "one row": {"packing": {"row_tokens": 2048, "micro_batch_tokens": 2048}},
    "gradient checkpointing": {"model": {"gradient_checkpointing": True}},
    "eager attention": {"model": {"attention": "eager"}, "packing": {"row_tokens": 64}},
}
PROCESSES: dict[str, tuple[int, dict[str, Any]]] = {
    "2 processes": (2, {}),
    "2 processes, cut": (2, {"data_shard": -1}),
    "4 processes": (4, {}),
    "4 processes, cut": (4, {"data_shard": 2, "tensor": 2}),
}


def stages(task: Path) -> dict[str, dict[str, Any]]:
    """The kinds, by name, on a model that is given as a mapping."""
    model = {"path": str(task / "model"), "attention": "sdpa"}
    batch = {"prompts": 5, "mini_batches": 2}
    near = {"where": "loss", "coef": 0.1}
    made = {
        "sft": toy.sft(task, model=model, batch_size=7, steps=2),
        "grpo": toy.rl(task, model=model, batch=batch, kl=near, loss={"entropy_coef": 0.01}, steps=2),
        "dr_grpo": toy.rl(
            task,
            model=model,
            batch=batch,
            advantage={"name": "dr_grpo"},
            loss={"name": "ppo_clip", "aggregation": "seq_mean_token_sum_norm"},
            steps=2,
        ),
        "gspo": toy.rl(task, model=model, batch=batch, loss={"name": "gspo"}, steps=2),
        "ppo": toy.rl(
            task,
            model=model,
            batch=batch,
            advantage={"name": "gae"},
            kl={"where": "reward", "estimator": "k1", "coef": 0.1},
            critic={"optimizer": SMOOTH | {"lr": 1e-3}},
            steps=2,
        ),
    }
    return {name: toy.merged(stage, {"optimizer": SMOOTH}) for name, stage in made.items()}


@pytest.fixture(scope="module")
def plain(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each kind as it is by default, and what its engine answered."""
    return run_alone(tmp_path_factory.mktemp("plain"), stages(task))


@pytest.mark.slow
@pytest.mark.parametrize("variation", ONE_PROCESS)
def test_of_one_process(task: Path, plain: Path, tmp_path: Path, variation: str) -> None:
    for name, stage in stages(task).items():
        changed = toy.merged(stage, ONE_PROCESS[variation])
        Job(tmp_path / name, changed, recorded=plain / f"{name}.json").run()
        assert_equal_runs(plain / name, tmp_path / name, stage["kind"])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_of_several_processes(task: Path, plain: Path, tmp_path: Path, world: int) -> None:
    jobs = [
        Job(tmp_path / variation / name, stages(task)[name], parallel, recorded=plain / f"{name}.json")
        for variation, (processes, parallel) in PROCESSES.items()
        if processes == world
        for name in KINDS
    ]
    run_ranks(world, jobs)
    for job in jobs:
        assert_equal_runs(plain / job.output.name, job.output, job.stage["kind"])
