"""Whole runs with real stages on a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from posttune.cli.main import main
from posttune.config.load import check_config, load_config
from posttune.config.models import STAGES
from posttune.errors import ConfigError, DataError, Interrupted, UserError
from posttune.run.folder import RunFolder
from posttune.run.runner import ALONE, FUNCTIONS, run, stage_function

REWARD = """
def distinct(response, level):
    return float(len(set(response)))
"""
MODEL = {
    "init": {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    },
    "tokenizer": "bytes",
}
CONVERT = {"source": "rows.jsonl", "map": {"prompt": "question", "response": "answer"}}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{n % 10}+{n // 10}=", "answer": str(n), "level": 1} for n in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


def converting(*overrides: str) -> Any:
    return check_config({"output": "out", "observers": [], "stages": {"convert": CONVERT}}, overrides)


def whole(steps: int = 3) -> dict[str, Any]:
    reward = {"name": "function", "options": {"path": "reward.py:distinct"}}
    greedy = {"sampling": {"max_new_tokens": 3}}
    return {
        "output": "out",
        "threads": 1,
        "stages": {
            "convert": CONVERT,
            "sft": {"model": MODEL, "data": "convert", "steps": 3, "batch_size": 8},
            "rl": {
                "model": "sft",
                "data": "convert",
                "rollout": {"sampling": {"n": 2, "max_new_tokens": 3}},
                "rewards": [reward],
                "batch": {"prompts": 2},
                "steps": steps,
            },
            "evaluate": {
                "model": "rl",
                "data": {"path": "convert", "limit": 4},
                "rewards": [reward],
                "rollout": greedy,
            },
            "export": {"model": "rl"},
        },
    }


class TestOneStage:
    def test_it_runs_and_is_remembered(self) -> None:
        (result,) = run(converting())
        folder = RunFolder("out")
        assert result.output == folder.data("convert")
        assert result.metrics["rows"] == 100
        assert not result.skipped
        marker = folder.read_marker("convert")
        assert marker is not None
        assert (marker.status, marker.output) == ("finished", "data/convert")
        assert marker.seconds == result.seconds > 0

    def test_what_was_resolved_and_where_is_written(self) -> None:
        loaded = converting("seed=5")
        run(loaded)
        assert load_config("out/resolved.yaml").config == loaded.config
        environment = json.loads(Path("out/environment.json").read_text())
        assert environment["seed"] == 5

    def test_a_second_run_is_refused_and_a_resumed_one_skips(self) -> None:
        (first,) = run(converting())
        with pytest.raises(UserError, match="holds a run already"):
            run(converting())
        (second,) = run(converting(), resume=True)
        assert second.skipped
        assert (second.output, second.metrics) == (first.output, first.metrics)
        assert len(json.loads(Path("out/environment.json").read_text())["resumes"]) == 1

    def test_resuming_nothing_begins(self) -> None:
        (result,) = run(converting(), resume=True)
        assert not result.skipped

    def test_a_problem_found_before_the_run_leaves_no_folder(self) -> None:
        with pytest.raises(ConfigError, match=r"nowhere\.jsonl"):
            run(converting("convert.source=nowhere.jsonl"))
        assert not Path("out").exists()

    def test_a_failed_stage_is_remembered_and_can_be_mended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise DataError("the disk is gone")

        with monkeypatch.context() as patched:
            patched.setattr("posttune.data.stage.run_convert", fail)
            with pytest.raises(DataError):
                run(converting())
        marker = RunFolder("out").read_marker("convert")
        assert marker is not None
        assert marker.status == "failed"
        (result,) = run(converting("convert.on_bad_row=skip"), resume=True)
        assert result.metrics["rows"] == 100

    def test_a_changed_finished_stage_is_refused(self) -> None:
        run(converting())
        with pytest.raises(UserError, match='on_bad_row: "refuse" -> "skip"'):
            run(converting("convert.on_bad_row=skip"), resume=True)

    def test_an_interrupt_between_stages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = {
            "output": "out",
            "observers": [],
            "stages": {"convert": CONVERT, "more": {"kind": "convert", **CONVERT}},
        }
        convert = stage_function("convert")

        def interrupted(stage: Any, context: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            return convert(stage, context)

        with monkeypatch.context() as patched:
            patched.setattr("posttune.data.stage.run_convert", interrupted)
            with pytest.raises(Interrupted, match="between two stages") as caught:
                run(check_config(data))
        assert caught.value.exit_code == 130
        assert [result.skipped for result in run(check_config(data), resume=True)] == [True, False]

    def test_the_file_of_a_reward_is_found_beside_the_configuration(self, place: Path) -> None:
        beside = place / "configs"
        beside.mkdir()
        (place / "reward.py").rename(beside / "beside.py")
        data = whole()
        data["stages"]["rl"]["rewards"][0]["options"]["path"] = "beside.py:distinct"
        data["stages"]["evaluate"]["rewards"][0]["options"]["path"] = "beside.py:distinct"
        (beside / "run.yaml").write_text(load_config(data).to_yaml())
        assert main(["run", "configs/run.yaml", "--dry-run"]) == 0


def test_every_kind_of_stage_has_a_function() -> None:
    assert set(FUNCTIONS) == set(STAGES) > ALONE
    for kind in FUNCTIONS:
        assert callable(stage_function(kind))


@pytest.mark.slow
class TestWholeRun:
    def test_in_one_process(self, capsys: pytest.CaptureFixture[str]) -> None:
        Path("run.yaml").write_text(load_config(whole()).to_yaml())
        assert main(["run", "run.yaml", "--plot"]) == 0
        shown = capsys.readouterr().out
        assert "rl: reward/mean, smoothed" in shown
        for name in ("convert", "sft", "rl", "evaluate", "export"):
            assert f"│ {name} " in shown
        assert "rows: 100" in shown
        assert "max_abs_logit_difference: 0" in shown
        for name in ("models/sft", "models/rl", "export"):
            assert (Path("out") / name / "model.safetensors").is_file()
        lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
        assert [line["global_step"] for line in lines if line["stage"] == "rl"] == [4, 5, 6]

        assert main(["run", "run.yaml", "--resume", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["run"] == "out"
        assert all(stage["skipped"] for stage in document["stages"])
        assert {stage["name"]: stage["steps"] for stage in document["stages"]}["rl"] == 3

    def test_ctrl_c_and_resume_end_where_an_undisturbed_run_ends(self) -> None:
        Path("run.yaml").write_text(load_config(whole(steps=12)).to_yaml())
        command = [sys.executable, "-m", "posttune", "run", "run.yaml"]
        with Path("log.txt").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.PIPE, text=True)
            wait_for(Path("log.txt"), "GRPO step 2/", process)
            process.send_signal(signal.SIGINT)
            _, messages = process.communicate(timeout=120)
        assert process.returncode == 130, messages
        assert "--resume" in messages
        assert "Traceback" not in messages
        marker = RunFolder("out").read_marker("rl")
        assert marker is not None
        assert marker.status == "interrupted"
        assert main(["run", "run.yaml", "--resume"]) == 0
        assert main(["run", "run.yaml", "output=other"]) == 0
        ours, theirs = (Path(name) / "export/model.safetensors" for name in ("out", "other"))
        assert ours.read_bytes() == theirs.read_bytes()

    def test_two_processes(self) -> None:
        Path("run.yaml").write_text(load_config(whole(steps=2)).to_yaml())
        command = [sys.executable, "-m", "posttune", "run", "run.yaml", "--nproc", "2", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert [stage["name"] for stage in document["stages"]] == [
            "convert",
            "sft",
            "rl",
            "evaluate",
            "export",
        ]
        assert json.loads(Path("out/environment.json").read_text())["machine"]["world_size"] == 2

    def test_a_mistake_is_told_once_whatever_the_number_of_processes(self) -> None:
        Path("run.yaml").write_text(load_config(whole()).to_yaml())
        command = [
            sys.executable,
            "-m",
            "posttune",
            "run",
            "run.yaml",
            "--nproc",
            "2",
            "convert.source=no.jsonl",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 2
        assert done.stderr.count("posttune: error: ") == 1
        assert "Traceback" not in done.stderr
        assert not Path("out").exists()


def wait_for(log: Path, words: str, process: subprocess.Popen[str]) -> None:
    """Wait until the words stand in the log. Fails where the process ends without them."""
    while words not in log.read_text():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
