from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_files import SMALL, run, write_jsonl
from data_tokenizers import chatml
from posttune.cli.main import main
from posttune.config.models import ConvertStage, RunConfig
from posttune.data.dataset import SampleDataset
from posttune.data.inspect import inspect_dataset, visible
from posttune.data.stage import run_convert
from posttune.facade import build_observers
from posttune.models.tokenizer import save_tokenizer
from posttune.run.folder import RunFolder
from posttune.run.stages import InterruptFlag, StageContext

BAD = SMALL / "bad"
GSM8K = SMALL / "formats" / "gsm8k_test.parquet"
Capture = pytest.CaptureFixture[str]


def cli(*words: object) -> int:
    return main([str(word) for word in words])


def cli_json(capsys: Capture, *words: object) -> Any:
    assert cli(*words, "--json") == 0
    return json.loads(capsys.readouterr().out)


class TestConvert:
    def test_json_is_what_interfaces_promise(self, tmp_path: Path, capsys: Capture) -> None:
        source = BAD / "empty_strings.jsonl"
        words = ("data", "convert", source, "--to", tmp_path / "out", "--on-bad-row", "skip")
        report = cli_json(capsys, *words)
        assert report.keys() == {"rows_in", "rows_out", "rejected", "warnings", "fingerprint"}
        assert (report["rows_in"], report["rows_out"]) == (3, 1)
        assert report["rejected"][0] == {"file": str(source), "row": 2, "reason": "empty prompt"}
        assert cli_json(capsys, *words) == report

    def test_all_options(self, tmp_path: Path, capsys: Capture) -> None:
        words = ["--converter", "prompt_response", "--map", "prompt=question", "--map", "answer=answer"]
        words += [
            "--tokenizer",
            "bytes",
            "--template",
            "none",
            "--on-bad-row",
            "refuse",
            "--max-length",
            "90",
        ]
        report = cli_json(
            capsys, "data", "convert", GSM8K, "--to", tmp_path / "out", *words, "--truncation", "middle"
        )
        assert report["rows_out"] == 43
        assert report["warnings"] == [{"code": "truncated", "count": 43}]
        assert SampleDataset(tmp_path / "out").lengths.max() == 90

    def test_options_of_a_converter(self, tmp_path: Path) -> None:
        converter = 'gsm8k:{"annotations": true}'
        assert cli("data", "convert", GSM8K, "--to", tmp_path / "out", "--converter", converter) == 0
        assert "<<" in SampleDataset(tmp_path / "out")[0]["response"]

    def test_text_output(self, tmp_path: Path, capsys: Capture) -> None:
        words = (
            "data",
            "convert",
            BAD / "mixed_types.jsonl",
            "--to",
            tmp_path / "out",
            "--on-bad-row",
            "skip",
        )
        assert cli(*words) == 0
        out = capsys.readouterr().out
        assert "2 of 5 rows in" in out
        assert "mixed_types.jsonl:4: response is an object" in out
        assert cli(*words) == 0
        assert "it was there already" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ((BAD / "empty.jsonl",), "no rows"),
            ((BAD / "nulls.parquet",), "nulls.parquet:2: chosen is null"),
            (("missing.jsonl",), "missing.jsonl: no such file"),
            ((Path(__file__).parent,), "is a folder without data files"),
            ((GSM8K, "--map", "prompt"), "--map prompt: is no ROLE=PATH"),
            ((GSM8K, "--map", "prompt=question", "--map", "prompt=answer"), "mapped twice"),
            ((GSM8K, "--map", "promt=question"), "did you mean 'prompt'"),
            ((GSM8K, "--converter", "gsm8k:{"), "are no JSON"),
            ((GSM8K, "--converter", "gsm8k:[]"), "no JSON object"),
            ((GSM8K, "--converter", 'gsm8k:{"anotations": true}'), "annotations"),
            ((GSM8K, "--converter", "gms8k"), "gsm8k"),
            ((GSM8K, "--tokenizer", "nowhere"), "tokenizer nowhere: no such folder"),
            ((GSM8K, "--template", "nowhere", "--tokenizer", "bytes"), "template nowhere: cannot be read"),
            ((GSM8K, "--max-length", "0"), "0 is not in the range"),
        ],
    )
    def test_mistakes_exit_2(
        self, words: tuple[object, ...], message: str, tmp_path: Path, capsys: Capture
    ) -> None:
        assert cli("data", "convert", *words, "--to", tmp_path / "out") == 2
        error = capsys.readouterr().err
        assert error.startswith("posttune: error: ")
        assert message in error
        assert "Traceback" not in error
        assert not list(tmp_path.iterdir())

    def test_help_shows_an_example(self, capsys: Capture) -> None:
        for words in (("data",), ("data", "convert"), ("data", "inspect")):
            assert cli(*words, "--help") == 0
            assert "posttune data" in capsys.readouterr().out.partition("Example:")[2]


class TestInspect:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        save_tokenizer(chatml(), tmp_path / "tok")
        rows: list[dict[str, Any]] = [
            {"prompt": "Hi", "response": "Yes\u001b[31m.", "level": 1},
            {"prompt": "What?", "response": "caf\u00c3\u00a9 " + "x" * 200},
            {"prompt": "What?", "response": "caf\u00c3\u00a9 " + "x" * 200},
            {"prompt": "", "response": "a"},
        ]
        path = write_jsonl(tmp_path / "x.jsonl", rows)
        return run(path, tmp_path / "out", tokenizer=tmp_path / "tok", on_bad_row="skip").path

    def test_findings(self, folder: Path) -> None:
        found = inspect_dataset(SampleDataset(folder), rows=2)
        assert found.rows == 3
        assert found.duplicates == 1
        assert found.rejected == 1
        assert found.rejected_examples[0]["reason"] == "empty prompt"
        assert found.missing == {"level": 2}
        assert found.garbled == {"control_character": 1, "mojibake": 2}
        assert [(o.row, o.column, o.codes) for o in found.oddities] == [
            (1, "response", ["control_character"]),
            (2, "response", ["mojibake"]),
            (3, "response", ["mojibake"]),
        ]
        first = found.samples[0]
        assert [(piece.text, piece.trained) for piece in first.pieces] == [
            ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False),
            ("Yes\x1b[31m.<|im_end|>", True),
        ]
        assert first.trained_tokens == len("Yes\x1b[31m.") + 1

    def test_json(self, folder: Path, capsys: Capture) -> None:
        found = cli_json(capsys, "data", "inspect", folder, "--rows", 1)
        assert found["rows"] == 3
        assert len(found["samples"]) == 1
        assert found["lengths"]["unit"] == "tokens"

    def test_text_escapes_what_a_terminal_would_obey(self, folder: Path, capsys: Capture) -> None:
        assert cli("data", "inspect", folder) == 0
        out = capsys.readouterr().out
        assert "\x1b[31m." not in out
        assert r"Yes\x1b[31m." in out
        assert "mojibake in 2" in out

    def test_source_files_and_overlap(self, tmp_path: Path, capsys: Capture) -> None:
        train = write_jsonl(tmp_path / "a.jsonl", [{"prompt": str(n), "response": "x"} for n in range(10)])
        test = write_jsonl(tmp_path / "b.jsonl", [{"prompt": str(n), "response": "y"} for n in range(8, 20)])
        found = cli_json(capsys, "data", "inspect", train, "--against", test)
        assert found["overlap"]["rows"] == 2
        assert found["overlap"]["of"] == 12
        assert found["overlap"]["examples"] == [f"{test}:1", f"{test}:2"]
        assert found["samples"][0]["pieces"][1] == {"text": "x", "trained": True}
        assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "b.jsonl"}
        assert cli("data", "inspect", train, "--against", test) == 0
        assert "2 of 12 prompts of the other are here too" in capsys.readouterr().out

    def test_conversations_without_tokens(self, tmp_path: Path) -> None:
        source = SMALL / "formats" / "sharegpt_fastchat_dummy.json"
        found = inspect_dataset(SampleDataset(run(source, tmp_path / "out").path), rows=1)
        spoken = [(piece.text.split(":")[0], piece.trained) for piece in found.samples[0].pieces]
        assert spoken == [("user", False), ("assistant", True)] * 2

    def test_missing_path(self, capsys: Capture) -> None:
        assert cli("data", "inspect", "nowhere") == 2
        assert "nowhere: no such file" in capsys.readouterr().err

    def test_visible(self) -> None:
        assert visible("a\tb\n\x00\u202eé") == "a\tb\n\\x00\\u202eé"


def test_stage(tmp_path: Path) -> None:
    from posttune.distributed.ranks import Ranks

    stage = ConvertStage.model_validate(
        {"source": str(GSM8K), "converter": {"name": "gsm8k"}, "tokenizer": "bytes"}
    )
    config = RunConfig(output=str(tmp_path / "run"), stages={"convert": stage})
    context = StageContext(
        run=config,
        name="convert",
        folder=RunFolder(config.output),
        observers=build_observers([]),
        resume=False,
        outputs={},
        interrupt=InterruptFlag(),
        ranks=Ranks(),
    )
    result = run_convert(stage, context)
    assert result.output == tmp_path / "run" / "data" / "convert"
    assert result.metrics["rows"] == 43
    assert result.metrics["tokens/max"] == SampleDataset(result.output).lengths.max()
    assert run_convert(stage, context).output == result.output
