"""A checkpoint that 1, 2 or 4 processes wrote, cut or not, is gone on with by 1, 2 or 4."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import trainer_toy as toy
from ranks_toy import SMOOTH, Job, assert_equal_runs, recording, run_ranks

WORLDS: dict[int, dict[str, Any]] = {1: {}, 2: {"data_shard": -1}, 4: {"data_shard": 2, "tensor": 2}}
KINDS = ("ppo", "sft-lora")


def stages(task: Path) -> dict[str, dict[str, Any]]:
    """A policy with a critic and an adaptive coefficient, saved in the background; and adapters."""
    lora = {"path": str(task / "model"), "lora": {"rank": 4}}
    made = {
        "ppo": toy.rl(
            task,
            batch={"prompts": 5},
            advantage={"name": "gae"},
            kl={"where": "reward", "estimator": "k1", "coef": 0.1, "target": 0.01},
            critic={"optimizer": SMOOTH | {"lr": 1e-3}},
            steps=4,
            checkpoint={"every": 2, "async_save": True},
        ),
        "sft-lora": toy.sft(task, model=lora, batch_size=7, steps=4, checkpoint={"every": 2}),
    }
    return {name: toy.merged(stage, {"optimizer": SMOOTH}) for name, stage in made.items()}


def run_in(world: int, jobs: list[Job]) -> None:
    if world > 1:
        run_ranks(world, jobs)
        return
    for job in jobs:
        job.run()


@pytest.mark.long
def test_any_number_of_processes_goes_on_with_what_any_other_wrote(task: Path, tmp_path: Path) -> None:
    made, answers = stages(task), {name: tmp_path / f"{name}.json" for name in KINDS}
    for name in KINDS:
        with recording(answers[name]):
            Job(tmp_path / "whole" / name, made[name]).run()
    for writer, parallel in WORLDS.items():
        place = tmp_path / f"{writer}"
        run_in(writer, [Job(place / name, made[name], parallel, False, answers[name]) for name in KINDS])
    resumed = {
        reader: [
            Job(_cut_back(tmp_path, writer, reader, name), made[name], parallel, True, answers[name])
            for writer in WORLDS
            for name in KINDS
        ]
        for reader, parallel in WORLDS.items()
    }
    for reader, jobs in resumed.items():
        run_in(reader, jobs)
        for job in jobs:
            assert_equal_runs(tmp_path / "whole" / job.output.name, job.output, job.stage["kind"])


def _cut_back(folder: Path, writer: int, reader: int, name: str) -> Path:
    """A copy of a finished run as it was after step 2."""
    copy = folder / f"{writer}-{reader}" / name
    shutil.copytree(folder / f"{writer}" / name, copy)
    shutil.rmtree(copy / "checkpoints" / "global_step_4")
    return copy
