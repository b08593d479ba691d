"""Models that are cut over 2 and 4 processes (FSDP2, tensor parallelism) learn what one process learns.

Samples and greedy baselines are drawn anew at every size, in float32; recorded ones are fed to all sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trainer_toy as toy
from ranks_toy import SMOOTH, Job, assert_equal_runs, run_alone, run_ranks

EVERY = ("sft", "sft-lora", "grpo", "grpo-lora", "ppo", "greedy", "refills")
KEPT = {"data_shard": -1, "reshard_after_forward": False}
LAYOUTS: dict[int, dict[str, tuple[dict[str, Any], tuple[str, ...]]]] = {
    2: {
        "shards": ({"data_shard": -1}, EVERY),
        "slices": ({"tensor": 2}, ("sft", "grpo-lora", "ppo")),
    },
    4: {
        "shards": (
            {"data_shard": -1, "reshard_after_forward": False},
            ("sft", "grpo-lora", "ppo", "refills"),
        ),
        "copies of shards": ({"data_shard": 2}, ("ppo",)),
        "shards of slices": ({"data_shard": 2, "tensor": 2}, ("grpo-lora", "ppo")),
        "copies of slices": ({"tensor": 2}, ("sft",)),
    },
}


def stages(task: Path) -> dict[str, dict[str, Any]]:
    """The kinds of training. An odd number of rows, so that shares differ, and one is all but empty."""
    answered = {"name": "function", "options": {"path": f"{task / 'rewards.py'}:seen"}}
    validation = {
        "every": 2,
        "data": {"path": str(task / "data"), "limit": 3},  # at 4 processes one has none
        "rewards": [answered],
        "sampling": {"temperature": 0.0, "max_new_tokens": 3},
    }
    lora = {"path": str(task / "model"), "lora": {"rank": 4}}
    made = {
        "sft": toy.sft(task, batch_size=7, evaluate=validation, packing={"micro_batch_tokens": 32}),
        "sft-lora": toy.sft(task, model=lora, batch_size=7),
        "grpo": toy.rl(
            task,
            batch={"prompts": 5, "mini_batches": 2},
            packing={"micro_batch_tokens": 64},
            kl={"where": "loss", "coef": 0.1},
        ),
        "grpo-lora": toy.rl(task, model=lora, batch={"prompts": 5}, kl={"where": "loss", "coef": 0.1}),
        "ppo": toy.rl(
            task,
            batch={"prompts": 5, "mini_batches": 2},
            advantage={"name": "gae"},
            kl={"where": "reward", "estimator": "k1", "coef": 0.1},
            critic={"optimizer": SMOOTH | {"lr": 1e-3}},
        ),
        "greedy": toy.rl(task, batch={"prompts": 4}, advantage={"name": "remax"}),
        "refills": toy.rl(  # of which some processes get none
            task,
            batch={"prompts": 5},
            rewards=[{"name": "function", "options": {"path": f"{task / 'rewards.py'}:rare"}}],
            dynamic_sampling={"max_refills": 2},
        ),
    }
    return {name: toy.merged(stage, {"optimizer": SMOOTH}) for name, stage in made.items()}


@pytest.fixture(scope="module")
def alone(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one process for every stage, and the answers that its engine gave."""
    return run_alone(tmp_path_factory.mktemp("alone"), stages(task))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_they_equal_one_process(task: Path, alone: Path, tmp_path: Path, world: int) -> None:
    jobs = [
        Job(tmp_path / layout / name, stages(task)[name], parallel)
        for layout, (parallel, names) in LAYOUTS[world].items()
        for name in names
    ]
    jobs += [
        Job(tmp_path / "recorded" / name, stages(task)[name], parallel, recorded=alone / f"{name}.json")
        for name, parallel in {"grpo": {}, "ppo": {"data_shard": -1}}.items()
    ]
    run_ranks(world, jobs)
    for job in jobs:
        assert_equal_runs(alone / job.output.name, job.output, job.stage["kind"])
