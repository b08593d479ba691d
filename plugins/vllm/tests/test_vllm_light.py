"""The backend without an engine, and what it imports."""

from __future__ import annotations

import subprocess
import sys

import pytest
from posttune.errors import UserError
from posttune_vllm import VllmBackend, VllmOptions


def test_a_backend_that_was_not_started() -> None:
    backend = VllmBackend(VllmOptions())
    assert backend.rollout_backend_stop()
    with pytest.raises(UserError, match="not running"):
        backend.rollout_backend_checksums()


def test_nothing_heavy_is_imported_to_list_or_configure() -> None:
    code = (
        "import sys; from posttune.pipeline import options_model; from posttune.describe import describe;"
        "options_model('rollout_backend', 'vllm'); describe('rollout_backend', 'vllm');"
        "print([m for m in ('vllm', 'torch', 'transformers', 'httpx2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
