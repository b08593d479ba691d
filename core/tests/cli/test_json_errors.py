"""With ``--json`` every command answers an error with one JSON document; the exit code stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from posttune.cli.main import cli, main
from posttune.errors import Interrupted

KEYS = {"code", "who", "what", "next"}
VALID = "output: out\nstages:\n  export: {model: m}\n"
CASES = [
    (["version", "--jsn", "--json"], 2, "NoSuchOption", "--jsn"),
    (["verson", "--json"], 2, "UsageError", "version"),
    (["config", "show", "no.yaml", "--json"], 2, "ConfigError", "no such file"),
    (["run", "run.yaml", "sead=1", "--json"], 2, "ConfigError", "sead"),
    (["plugins", "show", "reward", "gms8k", "--json"], 2, "UnknownPlugin", "did you mean 'gsm8k'?"),
    (["plugins", "list", "--kind", "rewrad", "--json"], 2, "UserError", "did you mean 'reward'?"),
    (["score", "--reward", "gsm8k", "--input", "no.jsonl", "--json"], 2, "DataError", ""),
    (["score", "--input", "no.jsonl", "--json"], 2, "UsageError", "--reward"),
    (["export", "nothing", "--to", "there", "--json"], 2, "ModelError", "no such folder"),
    (["generate", "nothing", "--prompt", "a", "--json"], 2, "ModelError", ""),
    (["evaluate", "nothing", "--data", "d", "--reward", "gsm8k", "--json"], 2, "", ""),
    (["data", "convert", "no.jsonl", "--to", "d", "--json"], 2, "DataError", ""),
    (["data", "inspect", "no.jsonl", "--json"], 2, "DataError", ""),
    (["models", "import", "no.gguf", "--to", "m", "--json"], 2, "", ""),
    (["selftest", "gold", "no.json", "--json"], 2, "", ""),
    (["doctor", "no_such_plugin", "--json"], 2, "UserError", "no_such_plugin"),
    (["doctor", "--plan", "--json"], 2, "UsageError", "--plan"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.yaml").write_text(VALID)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("arguments", "status", "code", "words"), CASES, ids=lambda value: str(value)[:40])
def test_one_document_and_the_same_exit_code(
    folder: Path,
    arguments: list[str],
    status: int,
    code: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(arguments) == status
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert list(document) == ["error"]
    assert set(document["error"]) >= KEYS
    assert document["error"]["what"]
    assert words in document["error"]["what"]
    assert document["error"]["code"] == code or not code
    assert "posttune: error: " in told.err


def test_problems_come_as_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run.yaml").write_text(VALID + "sead: 1\n")
    assert main(["run", "run.yaml", "--json"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["error"]["problems"]
    assert (problem["path"], problem["line"], problem["suggestion"]) == ("sead", 4, "seed")


def test_a_plugin_is_named_as_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "show", "reward", "gms8k", "--json"]) == 2
    plugin = json.loads(capsys.readouterr().out)["error"]["plugin"]
    assert (plugin["kind"], plugin["name"]) == ("reward", "gms8k")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (OSError(28, "No space left", "x"), 1, "OSError"),
        (Interrupted("stopped", fix="--resume"), 130, "Interrupted"),
    ],
)
def test_failures_that_are_no_mistakes(
    error: Exception,
    status: int,
    code: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "main", fail)
    assert main(["version", "--json"]) == status
    assert json.loads(capsys.readouterr().out)["error"]["code"] == code


def test_a_defect_of_ours_is_a_document_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise KeyError("gone")

    monkeypatch.setattr(cli, "main", fail)
    with pytest.raises(KeyError):
        main(["version", "--json"])
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "InternalError"


def test_without_json_nothing_is_on_stdout(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "show", "reward", "gms8k"]) == 2
    assert main(["score", "--reward", "a b", "--input", "x", "--", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_another_rank_is_silent(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(["config", "show", "no.yaml", "--json"]) == 2
    assert capsys.readouterr().out == ""
