"""Checkpoints of models that are cut over two processes are exported by one, as they stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_toy as toy
from posttune.checkpoint import dcp, store
from posttune.checkpoint._export import export_model
from posttune.checkpoint.sources import open_source
from ranks_toy import SMOOTH, Job, run_ranks
from safetensors.torch import load_file


def jobs(task: Path, folder: Path) -> dict[str, Job]:
    """Shards that are saved in the background, adapters among them, and slices."""
    lora = {"path": str(task / "model"), "lora": {"rank": 4}}
    background = {"checkpoint": {"every": 1, "async_save": True}, "steps": 2}
    ppo = toy.rl(
        task,
        batch={"prompts": 4},
        advantage={"name": "gae"},
        critic={"optimizer": SMOOTH | {"lr": 1e-3}},
        **background,
    )
    shards: dict[str, Any] = {"data_shard": -1}
    return {
        "ppo": Job(folder / "ppo", ppo, shards),
        "lora": Job(folder / "lora", toy.sft(task, model=lora, batch_size=7, **background), shards),
        "slices": Job(folder / "slices", toy.sft(task, batch_size=7, steps=2), {"tensor": 2}),
    }


@pytest.mark.slow
def test_the_export_is_the_model_that_the_stage_left(task: Path, tmp_path: Path) -> None:
    made = jobs(task, tmp_path)
    run_ranks(2, list(made.values()))
    for name, job in made.items():
        exported = export_model(open_source(job.output), tmp_path / "exported" / name)
        left = job.output / "models" / job.stage["kind"]
        one, other = (load_file(folder / "model.safetensors") for folder in (exported.path, left))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one), name
    last = tmp_path / "ppo" / "checkpoints" / "global_step_2"
    critic = load_file(
        export_model(open_source(last, part="critic"), tmp_path / "critic").path / "model.safetensors"
    )
    shapes = dcp.shapes(last / store.TENSORS)
    assert critic["score.weight"].shape == shapes["part/critic/model/score.weight"][0]
    assert critic["score.weight"].any()
