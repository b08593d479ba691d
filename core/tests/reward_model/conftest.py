"""One toy task for all tests of reward models."""

from __future__ import annotations

from pathlib import Path

import preference_toy as toy
import pytest
import torch

torch.set_num_threads(1)  # tiny tensors; and bit-equal runs need equal threads


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model``, ``rows.jsonl`` and ``data``; never written to."""
    folder = tmp_path_factory.mktemp("preferences")
    toy.make_task(folder)
    return folder


@pytest.fixture(scope="session")
def trained(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a reward model that has learnt the task."""
    output = tmp_path_factory.mktemp("runs") / "run"
    optimizer = {"lr": 3e-3, "warmup_steps": 5}
    toy.run_stage(
        output, toy.stage(task, batch_size=32, steps=60, optimizer=optimizer, holdout={"every": 20})
    )
    return output
