"""The command line: help, exit codes, errors, and what is imported when."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from posttune._version import __version__
from posttune.cli.failures import DISK
from posttune.cli.lazy import LazyGroup
from posttune.cli.main import cli, main
from posttune.cli.output import number, plain

pytestmark = pytest.mark.slow


def run(*arguments: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "posttune", *arguments]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **environ}, capture_output=True, text=True)


def commands() -> Iterator[tuple[str, ...]]:
    """Every command and group of ours, as the words that call it."""
    context = click.Context(cli)
    for name in cli.table if isinstance(cli, LazyGroup) else ():
        yield (name,)
        command = cli.get_command(context, name)
        if isinstance(command, click.Group):
            yield from ((name, inner) for inner in command.commands)


@pytest.mark.parametrize("words", [(), *commands()], ids=" ".join)
def test_every_help_shows_an_example(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Example" in text
    assert " ".join(("posttune", *words)) in text.split("Example", 1)[1]


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_every_command_takes_json(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    context = click.Context(cli)
    command = cli.get_command(context, words[0])
    if isinstance(command, click.Group) and len(words) == 1:
        return
    main([*words, "--help"])
    assert "--json" in capsys.readouterr().out


HEAVY = ("torch", "transformers", "peft", "pyarrow", "numpy", "rich", "plotext")
LIGHT = """
import sys
from posttune.cli.main import main
for words in {words!r}:
    assert main([*words, "--help"]) == 0
heavy = [name for name in {heavy!r} if name in sys.modules]
sys.stderr.write(",".join(heavy))
"""


def test_no_help_imports_anything_heavy() -> None:
    script = LIGHT.format(words=[(), *commands()], heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_listing_the_commands_imports_none_of_them() -> None:
    script = (
        "import sys; from posttune.cli.main import main; main(['--help']);"
        "sys.stderr.write(','.join(m for m in sys.modules if m.startswith('posttune.cli.')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    ours = {f"posttune.cli.{name}" for name in ("failures", "lazy", "main", "output")}
    assert set(done.stderr.split(",")) == ours


class TestVersion:
    def test_it_reads_metadata(self) -> None:
        done = run("version", "--json")
        found = json.loads(done.stdout)
        assert found["posttune"] == __version__
        assert found["python"] == ".".join(map(str, sys.version_info[:3]))
        assert found["torch"].startswith("2.")
        assert done.returncode == 0

    def test_in_words(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["version"]) == 0
        assert capsys.readouterr().out.startswith(f"posttune {__version__}\n")

    def test_the_option(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--version"]) == 0
        assert __version__ in capsys.readouterr().out


VALID = "output: out\nstages:\n  export: {model: m}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(VALID)
    return tmp_path


class TestExitCodes:
    @pytest.mark.parametrize(
        ("arguments", "code", "words"),
        [
            (["config", "check", "run.yaml"], 0, ""),
            (["verson"], 2, "no command 'verson'; did you mean 'version'?"),
            (["version", "--jsn"], 2, "--json"),
            (["config", "check"], 2, "CONFIG"),
            (["config", "check", "no.yaml"], 2, "no.yaml: no such file\n  next: check the path"),
            (["init", "toy", "--in", "run.yaml/no"], 2, "Not a directory\n  next: check the path"),
            (["config", "check", "."], 2, "is a folder"),
            (["config", "check", "run.yaml", "export.modle=x"], 2, "did you mean 'model'?"),
            (["run", "run.yaml", "sead=1"], 2, "did you mean 'seed'?"),
            (["run", "run.yaml", "--nproc", "0"], 2, "--nproc"),
            (["run", "run.yaml"], 2, "model m: no such folder"),
        ],
    )
    def test_of_a_real_process(self, folder: Path, arguments: list[str], code: int, words: str) -> None:
        done = run(*arguments, cwd=folder)
        assert done.returncode == code, done.stderr
        assert words in done.stderr
        assert "Traceback" not in done.stderr
        if code:
            assert done.stderr.startswith("posttune: error: ")
            assert done.stdout == ""
        assert {entry.name for entry in folder.iterdir()} == {"run.yaml"}

    def test_no_command_shows_the_help(self) -> None:
        done = run()
        assert done.returncode == 2
        assert "Commands:" in done.stderr

    def test_a_traceback_on_demand(self, folder: Path) -> None:
        done = run("config", "check", "no.yaml", cwd=folder, POSTTUNE_TRACEBACK="1")
        assert done.returncode == 2
        assert "Traceback" in done.stderr
        assert done.stderr.count("posttune: error: ") == 1

    def test_a_reader_that_stops_early_is_no_crash(self, folder: Path) -> None:
        command = f"{sys.executable} -m posttune config schema | head -c 10"
        done = subprocess.run(["sh", "-c", command], cwd=folder, capture_output=True, text=True)
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize(
        ("error", "code"),
        [(FileNotFoundError(2, "No such file", "x"), 2), (OSError(28, "No space left", "x"), 1)],
    )
    def test_errors_of_the_system(
        self, error: OSError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail(**_: object) -> None:
            raise error

        monkeypatch.setattr(cli, "main", fail)
        assert main([]) == code
        assert capsys.readouterr().err == f"posttune: error: x: {error.strerror}\n  next: {DISK}\n"


class TestConfig:
    def test_check_tells_all_problems_as_json(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "run.yaml").write_text(VALID + "sead: 1\nthreads: 0\n")
        assert main(["config", "check", str(folder / "run.yaml"), "--json"]) == 2
        found = json.loads(capsys.readouterr().out)
        assert found["ok"] is False
        assert [(p["line"], p["path"], p["suggestion"]) for p in found["problems"]] == [
            (4, "sead", "seed"),
            (5, "threads", ""),
        ]

    def test_check_of_a_valid_file(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["config", "check", str(folder / "run.yaml"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"ok": True, "problems": []}

    def test_show_can_be_run_again(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["config", "show", str(folder / "run.yaml"), "seed=3"]) == 0
        shown = capsys.readouterr().out
        (folder / "again.yaml").write_text(shown)
        assert main(["config", "show", str(folder / "again.yaml")]) == 0
        assert capsys.readouterr().out == shown
        assert "seed: 3\n" in shown

    def test_show_as_json(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["config", "show", str(folder / "run.yaml"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["stages"]["export"]["dtype"] == "keep"

    def test_schema_to_a_file(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        target = folder / "schemas/posttune.json"
        assert main(["config", "schema", "--output", str(target)]) == 0
        assert "yaml-language-server" in capsys.readouterr().out
        assert json.loads(target.read_text())["title"] == "RunConfig"

    def test_schema_to_a_folder_is_refused(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["config", "schema", "--output", str(folder)]) == 2
        assert "is a folder" in capsys.readouterr().err


PLUGIN = """
import click

@click.command()
def command() -> None:
    click.echo("hello from a plugin")
"""


def entry(folder: Path, name: str, module: str, distribution: str = "demo") -> None:
    """Install a distribution with one command, by its metadata alone."""
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[posttune.command]\n{name} = {module}:command\n")


class TestPluginCommands:
    @pytest.fixture
    def site(self, tmp_path: Path) -> Path:
        (tmp_path / "demo_command.py").write_text(PLUGIN)
        (tmp_path / "broken_command.py").write_text("raise SystemExit(3)\n")
        return tmp_path

    def call(self, site: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return run(*arguments, PYTHONPATH=f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", **environ)

    def test_it_is_listed_and_runs(self, site: Path) -> None:
        entry(site, "hello", "demo_command")
        assert "from demo" in self.call(site, "--help").stdout
        assert self.call(site, "hello").stdout == "hello from a plugin\n"

    def test_it_cannot_take_a_name_of_ours(self, site: Path) -> None:
        entry(site, "version", "broken_command")
        assert self.call(site, "version").stdout.startswith("posttune ")
        assert "from demo" not in self.call(site, "--help").stdout

    def test_a_broken_one_hurts_nobody_else(self, site: Path) -> None:
        entry(site, "hello", "broken_command")
        assert self.call(site, "--help").returncode == 0
        assert self.call(site, "version").returncode == 0
        done = self.call(site, "hello")
        assert done.returncode == 1
        assert "command 'hello' (demo 1.0)" in done.stderr

    def test_two_of_one_name_are_refused(self, site: Path) -> None:
        entry(site, "hello", "demo_command")
        entry(site, "hello", "broken_command", "other")
        done = self.call(site, "hello")
        assert done.returncode == 2
        assert "demo 1.0 and other 1.0" in done.stderr

    def test_a_blocked_one_is_refused(self, site: Path) -> None:
        entry(site, "hello", "demo_command")
        done = self.call(site, "hello", POSTTUNE_BLOCK="demo")
        assert done.returncode == 2
        assert "POSTTUNE_BLOCK" in done.stderr

    def test_something_else_than_a_command_is_refused(self, site: Path) -> None:
        (site / "odd_command.py").write_text("command = 3\n")
        entry(site, "hello", "odd_command")
        done = self.call(site, "hello")
        assert done.returncode == 1
        assert "names a int, not a click command" in done.stderr


def test_json_documents_hold_what_json_knows() -> None:
    value = {"a": float("nan"), 1: Path("x"), "b": (1, {2}), "c": float("inf"), "d": "é"}
    assert plain(value) == {"a": None, "1": "x", "b": [1, [2]], "c": None, "d": "é"}


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234, "1,234"), (0.123456, "0.1235"), (12345.6, "12,346"), (None, ""), (True, "yes"), ("x", "x")],
)
def test_numbers_in_tables(value: object, text: str) -> None:
    assert number(value) == text
