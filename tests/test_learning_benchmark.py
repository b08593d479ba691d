"""The comparison of algorithms learns something in a short version, and draws it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_one_seed_of_a_short_version_raises_the_reward(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/learning.py", "--folder", str(tmp_path), "--seeds", "0"]
    command += ["--algorithms", "reinforce_plus_plus", "--steps", "12"]
    command += ["--rl", "rl.optimizer.lr=2e-4", "rl.evaluate.every=6"]
    plot = tmp_path / "learning.png"
    if find_spec("matplotlib") is not None:
        command += ["--plot", str(plot)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reinforce_plus_plus" in done.stdout
    assert plot.is_file() == (find_spec("matplotlib") is not None)
