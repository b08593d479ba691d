"""What a run remembers of its environment."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from posttune import __version__
from posttune.config.load import load_config
from posttune.run.environment import describe, git_state, write_environment

CONFIG = load_config({"output": "x", "seed": 7, "stages": {"export": {"model": "m"}}}).plain()


def git(folder: Path, *arguments: str) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", *author, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_versions_plugins_seed_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTUNE_BLOCK", "nothing")
    found = describe(CONFIG, ["posttune", "run"])
    assert found["versions"]["posttune"] == __version__
    assert {"torch", "transformers", "numpy"} <= set(found["versions"])
    assert found["plugins"]["checkpoint_exporter hf"] == f"posttune {__version__}"
    assert (found["seed"], found["argv"]) == (7, ["posttune", "run"])
    assert found["variables"]["POSTTUNE_BLOCK"] == "nothing"
    assert found["machine"]["world_size"] == 1


def test_the_git_state_tells_whether_tracked_files_changed(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-q", "-b", "main")
    assert git_state(tmp_path) is None  # no commit yet
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-q", "-m", "a")
    (tmp_path / "untracked").touch()
    state = git_state(tmp_path)
    assert state == {"commit": git(tmp_path, "rev-parse", "HEAD"), "branch": "main", "dirty": False}
    (tmp_path / "a").write_text("2")
    changed = git_state(tmp_path)
    assert changed is not None
    assert changed["dirty"]


def test_without_git_there_is_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None


def test_a_resumed_run_adds_itself(tmp_path: Path) -> None:
    path = tmp_path / "environment.json"
    for argv in (["first"], ["second"], ["third"]):
        write_environment(path, CONFIG, argv)
    found = json.loads(path.read_text())
    assert found["argv"] == ["first"]
    assert [each["argv"] for each in found["resumes"]] == [["second"], ["third"]]
