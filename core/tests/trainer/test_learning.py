"""The policy learns what is rewarded, and memory stays flat."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import trainer_toy as toy
from posttune.trainer.loop import Position


@pytest.mark.slow
def test_longer_is_better_is_learnt_from_a_model_that_stops_early(task: Path, tmp_path: Path) -> None:
    short = toy.run_stage(tmp_path / "short", toy.sft(task, steps=40, optimizer={"lr": 1e-2}))
    stage = toy.rl(
        task,
        model=str(short.output),
        rewards=[{"name": "function", "options": {"path": f"{task / 'rewards.py'}:longer"}}],
        rollout={"sampling": {"n": 16, "max_new_tokens": 8}},
        batch={"prompts": 8},
        optimizer={"lr": 3e-3},
        steps=20,
    )
    toy.run_stage(tmp_path / "run", stage)
    lines = toy.metrics(tmp_path / "run")
    lengths = [line["tokens/completion"] for line in lines]
    assert sum(lengths[:2]) / 2 < 4
    assert sum(lengths[-3:]) / 3 > sum(lengths[:3]) / 3 + 2
    assert lines[-1]["reward/mean"] > 1.5 * lines[0]["reward/mean"]


@pytest.mark.slow
def test_memory_stays_flat_over_many_steps(task: Path, tmp_path: Path) -> None:
    process, position = psutil.Process(), Position()
    stage = toy.rl(task, steps=70, batch={"mini_batches": 2}, kl={"where": "loss"})
    with ExitStack() as stack:
        setup = toy.prepared(tmp_path, stage, stack)
        sizes = []
        for _ in range(2):
            for _ in range(35):
                position = position.after(setup.work.step(position).rows)
            gc.collect()
            sizes.append(process.memory_info().rss / 2**20)
    assert sizes[1] - sizes[0] < 30  # MiB; batches kept with their graphs would take more
