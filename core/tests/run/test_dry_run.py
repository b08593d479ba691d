"""What is found before a model is loaded, on every row, with nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from posttune.cli.main import main
from posttune.config.load import load_config
from posttune.data.conversion import ConvertRequest, convert
from posttune.errors import ConfigError, Problem
from posttune.run.dry_run import RunCheck, dry_run
from posttune.testing.tiny import tiny_model

pytestmark = pytest.mark.slow

REWARD = """
def plain(prompt, response):
    return 1.0

def reference(prompt, response, reference):
    return 1.0

def column(response, level):
    return 1.0

def broken(nothing):
    return 1.0
"""
GOOD = [{"question": f"{n}+1=", "answer": str(n + 1), "level": 1} for n in range(20)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", GOOD)
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


def write_rows(path: Path, rows: Sequence[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(model: Path, function: str = "plain") -> dict[str, Any]:
    reward = {"name": "function", "options": {"path": f"reward.py:{function}"}}
    return {
        "output": "out",
        "stages": {
            "convert": {"source": "rows.jsonl", "map": {"prompt": "question", "response": "answer"}},
            "sft": {"model": str(model), "data": "convert", "steps": 1},
            "rl": {
                "model": "sft",
                "data": "convert",
                "rollout": {"sampling": {"n": 2}},
                "rewards": [reward],
                "steps": 1,
            },
            "evaluate": {"model": "rl", "data": "convert", "rewards": [reward]},
            "export": {"model": "rl"},
        },
    }


def check(data: dict[str, Any], *overrides: str, world: int = 1) -> RunCheck:
    return dry_run(load_config(data, overrides), world=world)


def only(found: RunCheck) -> Problem:
    (problem,) = found.problems
    return problem


def test_a_sound_run_has_no_problems_and_leaves_no_trace(model: Path, place: Path) -> None:
    before = sorted(place.rglob("*"))
    found = check(config(model))
    assert found.problems == []
    assert found.warnings == []
    assert found.facts["convert"]["rows"] == 20
    assert sorted(path for path in place.rglob("*") if "__pycache__" not in path.parts) == before


class TestData:
    def test_a_column_that_a_reward_needs(self, model: Path, place: Path) -> None:
        write_rows(place / "rows.jsonl", [{"question": "1", "answer": "2", "leval": 3}])
        found = check(config(model, "column"))
        assert [problem.path for problem in found.problems] == ["stages.rl.data", "stages.evaluate.data"]
        assert "reward 'function' needs the column 'level'" in found.problems[0].message
        assert "prompt, response, leval" in found.problems[0].message
        assert found.problems[0].suggestion == "leval"

    def test_the_numbers_of_the_rows_that_lack_it(self, model: Path, place: Path) -> None:
        rows = [dict(row) for row in GOOD]
        for index in (4, 6, 10, 19):
            del rows[index]["level"]
        rows[8]["level"] = None
        write_rows(place / "rows.jsonl", rows)
        message = check(config(model, "column")).problems[0].message
        assert "5 rows lack: rows.jsonl:5, rows.jsonl:7, rows.jsonl:9 and 2 more" in message

    def test_the_response_is_the_reference_where_none_is_mapped(self, model: Path) -> None:
        assert check(config(model, "reference")).problems == []

    def test_a_reference_that_a_row_lacks(self, model: Path, place: Path) -> None:
        rows = [{**row, "gold": "1"} for row in GOOD]
        rows[2]["gold"] = None
        rows[3]["gold"] = ""
        write_rows(place / "rows.jsonl", rows)
        found = check(config(model, "reference"), "convert.map.reference=gold")
        assert "rows.jsonl:4" in found.problems[0].message

    def test_bad_rows_of_a_source(self, model: Path, place: Path) -> None:
        write_rows(place / "rows.jsonl", [*GOOD, {"question": "", "answer": "1"}])
        problem = only(check(config(model)))
        assert problem.path == "stages.convert.source"
        assert "rows.jsonl:21: empty prompt" in problem.message
        assert check(config(model), "convert.on_bad_row=skip").problems == []

    def test_a_source_that_is_missing_empty_or_a_folder(self, model: Path, place: Path) -> None:
        (place / "empty.jsonl").touch()
        (place / "folder").mkdir()
        for source in ("nowhere.jsonl", "empty.jsonl", "folder"):
            problem = only(check(config(model), f"convert.source={source}"))
            assert problem.path == "stages.convert.source"
            assert source in problem.message

    def test_a_column_that_is_not_there(self, model: Path) -> None:
        problem = only(check(config(model), "convert.map.prompt=questoin"))
        assert "did you mean 'question'" in problem.message

    def test_rows_without_an_answer_cannot_be_imitated(self, model: Path, place: Path) -> None:
        write_rows(place / "rows.jsonl", [{"question": "1"}])
        found = check(config(model), "convert.map={prompt: question}")
        assert [problem.path for problem in found.problems] == ["stages.sft.data"]
        assert "needs one of response, messages, text" in found.problems[0].message

    def test_a_dataset_that_was_converted_before(self, model: Path, place: Path) -> None:
        rows = [dict(row) for row in GOOD]
        del rows[12]["level"]
        write_rows(place / "rows.jsonl", rows)
        mapping = {"prompt": "question", "response": "answer"}
        convert(ConvertRequest(sources=["rows.jsonl"], to="data", map=mapping))
        data = config(model, "column")
        del data["stages"]["convert"]
        overrides = [f"{name}.data=data" for name in ("sft", "rl", "evaluate")]
        found = check(data, *overrides)
        assert [problem.path for problem in found.problems] == ["stages.rl.data", "stages.evaluate.data"]
        assert "1 row lacks: rows.jsonl:13" in found.problems[0].message
        limited = [f"{name}.data={{path: data, limit: 12}}" for name in ("sft", "rl", "evaluate")]
        assert check(data, *limited).problems == []

    def test_a_misspelt_stage_is_a_missing_dataset_with_a_hint(self, model: Path) -> None:
        problem = only(check(config(model), "sft.data=covert"))
        assert (problem.path, problem.suggestion) == ("stages.sft.data", "convert")

    def test_a_column_to_break_the_accuracy_down_by(self, model: Path) -> None:
        assert check(config(model), "evaluate.by=[level]").problems == []
        problem = only(check(config(model), "evaluate.by=[levle]"))
        assert problem.message.startswith("by needs the column 'levle'")
        assert problem.suggestion == "level"

    def test_the_data_of_a_validation_counts(self, model: Path) -> None:
        validation = (
            "{every: 1, data: nowhere, rewards: [{name: function, options: {path: 'reward.py:plain'}}]}"
        )
        problem = only(check(config(model), f"sft.evaluate={validation}"))
        assert problem.path == "stages.sft.evaluate.data"


class TestPlugins:
    @pytest.mark.parametrize(
        ("path", "words"),
        [
            ("reward.py:nothing", "has no 'nothing'"),
            ("nowhere.py:plain", "does not exist"),
            ("reward.py:broken", "takes no response"),
            ("syntax.py:plain", "SyntaxError"),
        ],
    )
    def test_a_function_that_cannot_be_used(self, model: Path, place: Path, path: str, words: str) -> None:
        (place / "syntax.py").write_text("def plain(:\n")
        override = f"rl.rewards=[{{name: function, options: {{path: '{path}'}}}}]"
        problem = only(check(config(model), override))
        assert problem.path == "stages.rl.rewards.0"
        assert words in problem.message

    def test_a_weight_for_a_reward_that_is_not_there(self, model: Path) -> None:
        problem = only(check(config(model), "rl.reward_manager.weights={functoin: 2}"))
        assert problem.path == "stages.rl.reward_manager"
        assert "'function'" in problem.message

    def test_groups_of_one(self, model: Path) -> None:
        problem = only(check(config(model), "rl.rollout.sampling.n=1"))
        assert problem.path == "stages.rl.rollout.sampling.n"

    def test_an_estimator_that_needs_a_critic(self, model: Path) -> None:
        problem = only(check(config(model), "rl.advantage.name=gae"))
        assert problem.path == "stages.rl.advantage.name"
        assert "critic" in problem.message

    def test_a_truncated_sampling_distribution_is_a_warning(self, model: Path) -> None:
        found = check(config(model), "rl.rollout.sampling.top_p=0.9")
        assert found.problems == []
        assert [warning.path for warning in found.warnings] == ["stages.rl.rollout.sampling.top_p"]


class TestModels:
    def test_a_folder_without_a_tokenizer(self, model: Path, place: Path) -> None:
        bare = place / "bare"
        shutil.copytree(model, bare, ignore=shutil.ignore_patterns("tokenizer*"))
        problem = only(check(config(bare)))
        assert problem.path == "stages.sft.model"
        assert "no tokenizer" in problem.message
        assert check(config(bare), "sft.model.tokenizer=bytes").problems == []

    def test_a_folder_without_weights(self, model: Path, place: Path) -> None:
        bare = place / "bare"
        shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
        assert "no weights" in only(check(config(bare))).message

    def test_a_path_that_does_not_exist(self, model: Path) -> None:
        problem = only(check(config(model), "evaluate.model=rll"))
        assert (problem.path, problem.suggestion) == ("stages.evaluate.model", "rl")

    def test_a_new_model_of_an_unknown_kind(self, model: Path) -> None:
        override = "sft.model={init: {model_type: lama}, tokenizer: bytes}"
        problem = only(check(config(model), override))
        assert problem.path == "stages.sft.model.init"
        assert "llama" in problem.message


class TestMachine:
    def test_a_device_that_is_not_there(self, model: Path) -> None:
        problem = only(check(config(model), "device=no_such_device"))
        assert problem.path == "device"

    def test_processes_that_cannot_be_laid_out(self, model: Path) -> None:
        problem = only(check(config(model), "parallel.data_shard=3", world=2))
        assert problem.path == "parallel"

    def test_more_processes_than_sequences(self, model: Path) -> None:
        data = config(model)
        assert check(data, "sft.batch_size=2", world=2).problems == []
        assert only(check(data, "sft.batch_size=2", world=3)).path == "stages.sft.batch_size"


class TestFolder:
    def test_an_export_replaces_nothing(self, model: Path, place: Path) -> None:
        (place / "used").mkdir()
        assert check(config(model), "export.to=used").problems == []
        (place / "used/precious").touch()
        assert "is not empty" in only(check(config(model), "export.to=used")).message

    def test_a_used_folder(self, model: Path, place: Path) -> None:
        (place / "out/stages").mkdir(parents=True)
        problem = only(check(config(model)))
        assert problem.path == "output"
        assert "holds a run already" in problem.message

    def test_a_file_on_the_way_to_the_output(self, model: Path) -> None:
        for key in ("output", "convert.to", "export.to"):
            problem = only(check(config(model), f"{key}=rows.jsonl/x"))
            assert "is a file, not a folder" in problem.message


def test_all_problems_come_at_once_and_raise_together(model: Path) -> None:
    found = check(
        config(model, "column"), "export.to=rows.jsonl/x", "evaluate.model=gone", "convert.map.response=level"
    )
    assert len(found.problems) >= 4
    with pytest.raises(ConfigError) as caught:
        found.raise_problems()
    assert caught.value.problems == found.problems


def test_the_command_reports_with_lines(model: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load_config(config(model))
    (place / "run.yaml").write_text(loaded.to_yaml())
    assert main(["run", "run.yaml", "--dry-run"]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert main(["run", "run.yaml", "--dry-run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"]
    assert document["stages"]["convert"] == {
        "kind": "convert",
        "rows": 20,
        "columns": ["prompt", "response", "level", "reference"],
    }
    (place / "rows.jsonl").unlink()
    assert main(["run", "run.yaml", "--dry-run", "--json"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["file"] == "run.yaml"
    assert "source:" in (place / "run.yaml").read_text().splitlines()[problem["line"] - 1]
    assert main(["run", "run.yaml", "--dry-run"]) == 2
    assert "rows.jsonl" in capsys.readouterr().err
