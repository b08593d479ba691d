"""``doctor --plan``: what is asked of the resolver, and what is made of its answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plugin_wheels import Python
from posttune.doctor import plan
from posttune.doctor.diagnose import plan as ask
from posttune.errors import UserError

ROOT = Path(__file__).parents[3]


def resolver(folder: Path, body: str) -> Path:
    """A program that stands for uv."""
    program = folder / "uv"
    program.write_text(f"#!/bin/sh\ncat > {folder}/asked.txt\n{body}\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(plan, "find_uv", lambda: str(tmp_path / "uv"))
    return tmp_path


def test_what_fits_together_is_possible(uv: Path) -> None:
    resolver(uv, "echo 'torch==2.13.0'; echo 'vllm==0.32.0'; echo 'x==1'")
    (finding,) = ask(["posttune-sympy", "vllm>=0.3"]).findings
    assert (finding.code, finding.severity) == ("plan-possible", "info")
    assert finding.cause == "3 packages fit together, among them torch==2.13.0, vllm==0.32.0"
    assert finding.fix == 'pip install "posttune-sympy" "vllm>=0.3"'


def test_local_projects_are_given_by_path(uv: Path) -> None:
    resolver(uv, "echo 'torch==2.13.0'")
    ask(["posttune-sympy[engine]", str(ROOT / "plugins/bertscore"), "torch"])
    lines = (uv / "asked.txt").read_text().splitlines()
    assert lines[0] == f"posttune-sympy[engine] @ {(ROOT / 'plugins/sympy').as_uri()}"
    assert lines[1] == f"posttune-bertscore @ {(ROOT / 'plugins/bertscore').as_uri()}"
    assert lines[2:] == ["torch", f"posttune @ {(ROOT / 'core').as_uri()}"]


CONFLICT = (
    "error: No solution found when resolving dependencies\n"
    "  cause: Because a==1 depends on tilelang==0.1.11 and b==1 depends on tilelang==0.1.9,\n"
    "         we can conclude that a==1 and b==1 are incompatible."
)


def test_a_conflict_is_told_with_its_reason(uv: Path) -> None:
    (uv / "answer").write_text(CONFLICT)
    resolver(uv, f"cat {uv}/answer >&2; exit 1")
    found = ask(["a", "b"])
    assert not found.ok
    assert found.findings[0].code == "plan-impossible"
    assert found.findings[0].cause.startswith("Because a==1 depends on tilelang==0.1.11 and b==1 depends")
    assert "an environment of its own" in found.findings[0].fix


@pytest.mark.parametrize("body", ["echo 'error: Failed to fetch' >&2; exit 2", "exit 2", "sleep 30"])
def test_no_answer_is_no_verdict(uv: Path, body: str) -> None:
    resolver(uv, body)
    (finding,) = ask(["a"], deadline=1.0).findings
    assert (finding.code, finding.severity) == ("plan-unknown", "error")


def test_without_the_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "find_uv", lambda: None)
    (finding,) = ask(["a"]).findings
    assert finding.code == "plan-unknown"
    assert finding.fix == 'pip install "posttune[plan]"'


@pytest.mark.parametrize(
    ("text", "words"), [("a b", "is no requirement"), ("./nowhere", "no pyproject.toml")]
)
def test_what_cannot_be_meant(uv: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        ask([text])


@pytest.mark.install
def test_the_real_resolver_sees_a_conflict_without_any_network(python: Python, tmp_path: Path) -> None:
    """Two projects by path whose pins exclude each other: no index is needed to know it."""
    for name, pin in (("one", "==1.0"), ("two", ">=2")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "pyproject.toml").write_text(
            f'[project]\nname = "posttune-{name}"\nversion = "1"\ndependencies = ["nothing{pin}"]\n'
        )
    done = python(
        "-m", "posttune", "doctor", "--plan", "./one", "./two", "--json", UV_OFFLINE="1", UV_NO_INDEX="1"
    )
    document = json.loads(done.stdout)
    assert done.returncode == 1
    assert document["findings"][0]["code"] == "plan-impossible"
