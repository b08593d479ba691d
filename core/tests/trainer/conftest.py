"""One toy task for all tests of the trainers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import trainer_toy as toy

torch.set_num_threads(1)  # tiny tensors; and bit-equal runs need equal threads


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model``, ``data`` and ``rewards.py``; never written to."""
    folder = tmp_path_factory.mktemp("task")
    toy.make_task(folder)
    return folder
