"""One toy task for all tests of the Python API."""

from __future__ import annotations

from pathlib import Path

import api_task
import pytest
import torch

torch.set_num_threads(1)  # tiny tensors; and bit-equal runs need equal threads


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model``, ``raw.jsonl`` and ``data``; never written to."""
    folder = tmp_path_factory.mktemp("api")
    api_task.make_task(folder)
    return folder
