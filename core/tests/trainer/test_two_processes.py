"""The loop with two gloo processes gives what one gives: loss, metrics, weights, samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trainer_toy as toy
from ranks_toy import SMOOTH, TOLERANCE, Job, assert_equal_runs, run_ranks


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
            critic={"optimizer": SMOOTH | {"lr": 1e-3}, "warmup_steps": 1},
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
    return {name: toy.merged(stage, {"optimizer": SMOOTH}) for name, stage in made.items()}


@pytest.mark.slow
def test_two_processes_equal_one(task: Path, tmp_path: Path) -> None:
    jobs = stages(task)
    run_ranks(2, [Job(tmp_path / f"{name}-2", stage) for name, stage in jobs.items()])
    for name, stage in jobs.items():
        one, two = tmp_path / f"{name}-1", tmp_path / f"{name}-2"
        toy.run_stage(one, stage)
        assert_equal_runs(one, two, stage["kind"])


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_resumes_with_one(task: Path, tmp_path: Path) -> None:
    stage = toy.sft(task, steps=4, batch_size=7, checkpoint={"every": 2})
    toy.run_stage(tmp_path / "whole", stage)
    run_ranks(2, [Job(tmp_path / "parts", stage)])
    last = tmp_path / "parts" / "checkpoints" / "global_step_4"
    last.rename(tmp_path / "put aside")
    toy.run_stage(tmp_path / "parts", stage, resume=True)
    assert_losses(tmp_path / "whole", tmp_path / "parts")


def assert_losses(one: Path, other: Path) -> None:
    losses = [[line["loss"] for line in toy.metrics(folder)] for folder in (one, other)]
    assert losses[1] == pytest.approx(losses[0], rel=TOLERANCE)
