"""The plugin template: every kind bakes into exactly these files, clean at birth, found once installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
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
        timeout=2500,
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


@pytest.fixture(scope="module")
def fresh(baked: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment: posttune from this tree and what the template made, none else of ours.

    What others made is that of the environment that runs the tests, linked, so that nothing is fetched.
    """
    home = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(home, with_pip=False)
    (site,) = home.glob("lib/python*/site-packages")
    linked = home / "others"
    linked.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "posttune" not in path.name and path.suffix != ".pth":
            (linked / path.name).symlink_to(path)
    (site / "others.pth").write_text(f"{linked}\n", encoding="utf-8")
    python = home / "bin/python"
    pip = ("pip", "--python", python, "install", "-q", "--no-deps", "--no-build-isolation", "--no-index")
    run(sys.executable, "-m", *pip, ROOT / "core", *baked.values(), cwd=home, PYTHONPATH=str(linked))
    return python


@pytest.mark.install
@pytest.mark.slow
def test_installed_they_are_listed_beside_posttune_alone(
    fresh: Path, baked: dict[str, Path], tmp_path: Path
) -> None:
    output = run(fresh, "-m", "posttune", "plugins", "list", "--load", "--json", cwd=tmp_path)
    entries = [entry for entry in json.loads(output) if entry["distribution"] != "posttune"]
    found = {(entry["kind"], entry["name"], entry["distribution"], entry["status"]) for entry in entries}
    assert found == {(kind, f"my_{kind}", f"posttune-my-{kind.replace('_', '-')}", "ready") for kind in KINDS}


@pytest.mark.install
@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_their_own_tests_pass_and_the_kit_with_them(
    fresh: Path, baked: dict[str, Path], tmp_path: Path
) -> None:
    """In one process, that imports torch once."""
    options = ("-v", "-p", "no:cacheprovider", "--rootdir", tmp_path, "-c", os.devnull)
    tests = [project / "tests" for project in baked.values()]
    output = run(fresh, "-m", "pytest", *options, *tests, cwd=tmp_path, OMP_NUM_THREADS="1")
    for kind in KINDS:
        found = re.findall(rf"test_my_{kind}\.py::(\S+) (\w+)", output)
        assert {verdict for _, verdict in found} == {"PASSED"}, kind
        assert sum(name.startswith("TestKit::") for name, _ in found) > 20, kind
        assert any(not name.startswith("TestKit::") for name, _ in found), kind


@pytest.mark.install
@pytest.mark.slow
def test_the_baked_reward_trains_in_the_quickstart_by_one_line(fresh: Path, tmp_path: Path) -> None:
    """The line is added to the rewards that the quickstart names; everything else is as it stands."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    run(fresh, "configs/quickstart/make_data.py", "runs/quickstart-data", cwd=tmp_path)
    lines = (ROOT / "configs/quickstart.yaml").read_text(encoding="utf-8").splitlines()
    place = lines.index("      rewards: &exact")
    line = '        - {name: my_reward, options: {word: "1"}}'
    changed = "\n".join([*lines[: place + 4], line, *lines[place + 4 :]]) + "\n"
    (tmp_path / "mine.yaml").write_text(changed, encoding="utf-8")
    small = ("sft.steps=10", "sft.evaluate.every=5", "grpo.steps=3", "grpo.batch.prompts=8")
    limits = ("before.data={path: test, limit: 16}", "after.data={path: test, limit: 16}")
    run(fresh, "-m", "posttune", "run", "mine.yaml", *small, *limits, cwd=tmp_path, OMP_NUM_THREADS="1")
    text = (tmp_path / "runs/quickstart/metrics.jsonl").read_text(encoding="utf-8")
    steps = [entry for entry in map(json.loads, text.splitlines()) if entry["stage"] == "grpo"]
    assert len(steps) == 3
    for step in steps:
        both = step["reward/exact/mean"] + step["reward/my_reward/mean"]
        assert step["reward/mean"] == pytest.approx(both)
        assert step["grad_norm"] > 0


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
