"""The plugin template: every kind bakes into exactly these files, clean at birth, found once installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cookiecutter.exceptions import FailedHookException
from cookiecutter.main import cookiecutter
from posttune.kinds import KINDS

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "core/src/posttune/template"
PATHS = {
    ".github/workflows/test.yml",
    ".gitignore",
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "src/posttune_my_{kind}/__init__.py",
    "src/posttune_my_{kind}/py.typed",
    "tests/test_my_{kind}.py",
}
AWKWARD = """It's a "good" \\ <one> & more: é 🙂 "quoted\""""


def bake(folder: Path, **context: str) -> Path:
    """The project that the template makes of these answers."""
    return Path(cookiecutter(str(TEMPLATE), no_input=True, output_dir=str(folder), extra_context=context))


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command; its output, or the test fails with it."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One project of every kind, with a description that needs escaping."""
    folder = tmp_path_factory.mktemp("baked")
    return {kind: bake(folder, kind=kind, name=f"my_{kind}", description=AWKWARD) for kind in KINDS}


def test_the_folder_at_the_root_is_the_packaged_template() -> None:
    assert (ROOT / "plugin_template").resolve() == TEMPLATE


def test_it_offers_every_kind() -> None:
    offered = json.loads((TEMPLATE / "cookiecutter.json").read_text(encoding="utf-8"))["kind"]
    assert sorted(offered) == sorted(KINDS)


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_paths_are_exactly_these(baked: dict[str, Path], kind: str) -> None:
    project = baked[kind]
    assert project.name == f"posttune-my-{kind.replace('_', '-')}"
    found = {path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file()}
    assert found == {path.format(kind=kind) for path in PATHS}
    assert not [path for path in found if "{{" in (project / path).read_text(encoding="utf-8")]


def test_lint_and_format_are_clean(baked: dict[str, Path]) -> None:
    for project in baked.values():
        run(sys.executable, "-m", "ruff", "check", "--no-cache", ".", cwd=project)
        run(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", ".", cwd=project)


@pytest.mark.slow
def test_types_are_clean(baked: dict[str, Path], tmp_path: Path) -> None:
    packages = [project / "src" / f"posttune_my_{kind}" for kind, project in baked.items()]
    # The cache and the configuration of `make check`, which has read torch and transformers already.
    ours = ("--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache")
    run(sys.executable, "-m", "mypy", *ours, *packages, cwd=tmp_path, MYPYPATH=str(ROOT / "core/src"))


@pytest.mark.slow
def test_their_own_tests_pass(baked: dict[str, Path], tmp_path: Path) -> None:
    sources = os.pathsep.join(str(project / "src") for project in baked.values())
    tests = [project / "tests" for project in baked.values()]
    options = ("-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, "-c", os.devnull)
    output = run(sys.executable, "-m", "pytest", *options, *tests, cwd=tmp_path, PYTHONPATH=sources)
    assert f"{len(KINDS)} passed" in output


@pytest.mark.install
@pytest.mark.slow
def test_installed_they_are_listed_and_their_options_shown(baked: dict[str, Path], tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = ("pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--target", site)
    run(sys.executable, "-m", *pip, *baked.values(), cwd=tmp_path)
    output = run(
        sys.executable, "-m", "posttune", "plugins", "list", "--json", cwd=tmp_path, PYTHONPATH=str(site)
    )
    entries = {(entry["kind"], entry["name"]): entry for entry in json.loads(output)}
    for kind in KINDS:
        entry = entries[kind, f"my_{kind}"]
        assert entry["status"] == "ready", entry
        assert entry["distribution"] == f"posttune-my-{kind.replace('_', '-')}"


@pytest.mark.parametrize("name", ["My", "9lives", "a-b", "class", "a__b", "", "ümlaut", "os.path"])
def test_a_name_that_is_no_module_is_refused(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FailedHookException):
        bake(tmp_path, name=name)
    assert "cannot name a plugin" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("field", ["description", "author"])
@pytest.mark.parametrize("text", ["two\nlines", " ", "bell\a"])
def test_a_text_of_several_lines_is_refused(tmp_path: Path, field: str, text: str) -> None:
    with pytest.raises(FailedHookException):
        bake(tmp_path, name="fine", **{field: text})
    assert not list(tmp_path.iterdir())
