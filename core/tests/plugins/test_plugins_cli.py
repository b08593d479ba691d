"""``posttune plugins``: the shapes that scripts rely on, and the exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from plugin_wheels import Install, Python, plugin

GOOD = '''
from typing import Literal
from pydantic import BaseModel, ConfigDict, Field
from posttune import hookimpl

class Plugin:
    """Rewards short answers.

    More is said here.
    """

    class Config(BaseModel):
        model_config = ConfigDict(extra="forbid")
        target: int = Field(gt=0, description="Words.")
        mode: Literal["hard", "soft"] | None = Field(None, description="How.")

    def __init__(self, config):
        self.config = config

    @hookimpl
    def reward_score(self, samples):
        return [1.0 for _ in samples]
'''
BROKEN = "print('noise on stdout')\nimport sys\nsys.exit(4)\n"
KEYS = ["kind", "name", "distribution", "version", "api", "status", "reason"]


def site_of_all_statuses(install: Install) -> Path:
    good = plugin("good", "reward", GOOD)
    return install(
        good,
        plugin("broken", "reward", BROKEN),
        plugin("engineless", "reward", GOOD, extras={"engine": ("no-such-engine>=2",)}),
        plugin("engineold", "reward", GOOD, extras={"engine": ("pluggy>=99",)}),
        plugin("otherapi", "reward", GOOD, requires=("posttune>=9",)),
        plugin("twice", "reward", GOOD),
        replace(plugin("twice", "reward", GOOD), distribution="another-twice"),
        plugin("forbidden", "reward", GOOD),
    )


STATUSES = {
    "good": "ready",
    "broken": "ready",
    "engineless": "engine missing",
    "engineold": "engine conflict",
    "otherapi": "api mismatch",
    "twice": "duplicate",
    "forbidden": "blocked",
    "gsm8k": "ready",
}


def listed(python: Python, site: Path, *arguments: str) -> list[dict[str, str]]:
    command = ["-m", "posttune", "plugins", "list", "--json", *arguments]
    result = python(*command, path=site, POSTTUNE_BLOCK="forbidden")
    assert result.returncode == 0, result.stderr
    document: list[dict[str, str]] = json.loads(result.stdout)
    return document


def test_the_shape_of_the_list_is_a_promise(install: Install, python: Python) -> None:
    entries = listed(python, site_of_all_statuses(install), "--kind", "reward")
    assert all(list(entry) == KEYS for entry in entries)
    assert all(isinstance(value, str) for entry in entries for value in entry.values())
    status = {entry["name"]: entry["status"] for entry in entries}
    assert {name: status[name] for name in STATUSES} == STATUSES
    assert [entry["name"] for entry in entries].count("twice") == 2
    for entry in entries:
        assert bool(entry["reason"]) == (entry["status"] != "ready")
    (good,) = [entry for entry in entries if entry["name"] == "good"]
    assert good == {
        "kind": "reward",
        "name": "good",
        "distribution": "posttune-good",
        "version": "1.2.3",
        "api": "<0.2,>=0.1",
        "status": "ready",
        "reason": "",
    }


def test_load_finds_the_broken_and_keeps_stdout_clean(install: Install, python: Python) -> None:
    entries = listed(python, site_of_all_statuses(install), "--kind", "reward", "--load")
    status = {entry["name"]: entry["status"] for entry in entries}
    assert {name: status[name] for name in STATUSES} == {**STATUSES, "broken": "broken"}
    (broken,) = [entry for entry in entries if entry["name"] == "broken"]
    assert "called sys.exit(4)" in broken["reason"]


def test_the_table_names_everything_and_the_reasons(install: Install, python: Python) -> None:
    site = site_of_all_statuses(install)
    result = python("-m", "posttune", "plugins", "list", path=site, POSTTUNE_BLOCK="forbidden")
    assert result.returncode == 0
    for words in (
        "reward: scores samples",
        "policy_loss: loss of each response token",
        "posttune-good 1.2.3",
        "<0.2,>=0.1",
        "otherapi: it requires posttune>=9, and this is posttune 0.1",
        "twice: another-twice 1.2.3 and posttune-twice 1.2.3 both offer this name",
        "forbidden: POSTTUNE_BLOCK forbids it",
    ):
        assert words in result.stdout


def test_show_as_json(install: Install, python: Python) -> None:
    site = install(plugin("good", "reward", GOOD))
    result = python("-m", "posttune", "plugins", "show", "reward", "good", "--json", path=site)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["distribution"] == "posttune-good"
    assert document["class"] == "posttune_good:Plugin"
    assert document["file"] == str(site / "posttune_good.py")
    assert document["summary"] == "Rewards short answers."
    assert document["options"] == [
        {"name": "target", "type": "int > 0", "required": True, "default": None, "description": "Words."},
        {
            "name": "mode",
            "type": "'hard' | 'soft' | None",
            "required": False,
            "default": None,
            "description": "How.",
        },
    ]
    (hook,) = document["hooks"]
    assert hook["name"] == "reward_score"
    assert hook["signature"] == "(samples: Sequence[Sample]) -> Sequence[Score]"


def test_show_as_tables(install: Install, python: Python) -> None:
    site = install(plugin("good", "reward", GOOD))
    result = python("-m", "posttune", "plugins", "show", "reward", "good", path=site)
    assert result.returncode == 0, result.stderr
    for words in ("Rewards short answers.", "posttune-good 1.2.3", "required", "int > 0", "reward_score("):
        assert words in result.stdout


def test_mistakes_exit_with_2_and_failures_with_1(install: Install, python: Python) -> None:
    site = install(plugin("broken", "reward", BROKEN))
    for arguments, code, words in (
        (("show", "reward", "gms8k"), 2, "did you mean 'gsm8k'?"),
        (("show", "rewards", "gsm8k"), 2, "did you mean 'reward'?"),
        (("list", "--kind", "rewrad"), 2, "did you mean 'reward'?"),
        (("show", "reward", "broken"), 1, "called sys.exit(4)"),
    ):
        result = python("-m", "posttune", "plugins", *arguments, path=site)
        assert result.returncode == code, result.stderr
        assert words in result.stderr
        assert "Traceback" not in result.stderr
        assert "next: " in result.stderr


def test_help_has_examples(python: Python) -> None:
    for arguments in ((), ("list",), ("show",)):
        result = python("-m", "posttune", "plugins", *arguments, "--help")
        assert result.returncode == 0
        assert "Example" in result.stdout
        assert "posttune plugins" in result.stdout.partition("Example")[2]
