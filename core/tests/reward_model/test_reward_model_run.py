"""A whole run: preferences become a reward model, which an rl stage and an evaluation name by its stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import preference_toy as toy
import pytest
from posttune.cli.main import main
from posttune.cli.run_report import key_metric
from posttune.config.load import load_config
from posttune.errors import ConfigError
from posttune.run.dry_run import dry_run
from posttune.run.runner import run


def config(task: Path, output: Path) -> dict[str, Any]:
    reward = {"name": "model", "options": {"path": "judge"}}
    prompts = {"path": "prompts", "limit": 8}
    sampling = {"max_new_tokens": 4}
    return {
        "output": str(output),
        "stages": {
            "pairs": {"kind": "convert", "source": str(task / "rows.jsonl")},
            "prompts": {
                "kind": "convert",
                "source": str(task / "rows.jsonl"),
                "converter": {"name": "prompt_response"},
                "map": {"prompt": "prompt", "response": "chosen"},
            },
            "judge": {"kind": "reward_model", "model": str(task / "model"), "data": "pairs", "steps": 2},
            "rl": {
                "model": str(task / "model"),
                "data": prompts,
                "rollout": {"sampling": {"n": 2, **sampling}},
                "batch": {"prompts": 2},
                "rewards": [reward],
                "steps": 1,
                "evaluate": {"every": 1, "data": prompts, "rewards": [reward], "sampling": sampling},
            },
            "evaluate": {
                "model": "rl",
                "data": prompts,
                "rewards": [reward],
                "rollout": {"sampling": sampling},
            },
            "export": {"model": "judge", "dtype": "bfloat16"},
        },
    }


@pytest.mark.slow
def test_a_stage_is_a_reward_by_its_name(task: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    results = run(load_config(config(task, output)))
    by_name = dict(zip(config(task, output)["stages"], results, strict=True))
    assert key_metric("reward_model", by_name["judge"]).startswith("val/accuracy: ")
    lines = {line["stage"]: line for line in toy.metrics(output)}
    assert lines["judge"]["global_step"] == 2
    assert lines["rl"]["global_step"] == 3
    assert lines["rl"]["reward/std"] > 0
    assert "reward/model/mean" in lines["rl"]
    assert (output / "export" / "model.safetensors").is_file()
    again = run(load_config(config(task, output)), resume=True)
    assert all(result.skipped for result in again)


def problems(data: dict[str, Any]) -> list[str]:
    try:
        return [f"{each.path}: {each.message}" for each in dry_run(load_config(data)).problems]
    except ConfigError as error:
        return [f"{each.path}: {each.message}" for each in error.problems]


def test_a_dry_run_knows_a_stage_that_is_still_to_run(task: Path, tmp_path: Path) -> None:
    assert problems(config(task, tmp_path / "run")) == []
    assert not (tmp_path / "run").exists()


def test_what_a_dry_run_finds(task: Path, tmp_path: Path) -> None:
    data = config(task, tmp_path / "run")
    stages = data["stages"]
    stages["judge"]["data"] = "prompts"
    stages["judge"]["epochs"] = 1.0
    stages["rl"]["model"] = "judge"
    stages["rl"]["rewards"] = [{"name": "model", "options": {"path": "pairs"}}]
    stages["evaluate"]["rewards"] = [{"name": "model", "options": {"path": "nowhere"}}]
    found = "\n".join(problems(data))
    assert "stages.judge: give either steps or epochs" in found
    assert "stages.rl.model: stage 'judge' is of kind reward_model" in found
    assert "stages.rl.rewards.0.options.path: stage 'pairs' is of kind convert" in found

    del stages["judge"]["epochs"]
    stages["rl"]["model"] = str(task / "model")
    stages["rl"]["rewards"] = stages["rl"]["evaluate"]["rewards"]
    found = "\n".join(problems(data))
    assert "stages.judge.data: a reward model needs the column 'chosen'" in found
    assert "stages.evaluate.rewards.0: model nowhere: no such folder" in found


def test_a_reward_model_is_refused_where_answers_are_generated(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = toy.run_stage(tmp_path / "judge", toy.stage(task, steps=1)).output
    data = config(task, tmp_path / "run")
    data["stages"]["rl"]["model"] = str(folder)
    data["stages"]["judge"]["model"] = str(folder)
    (found,) = problems(data)
    assert found.startswith("stages.rl.model: ")
    assert "is a sequence classifier, as reward models are" in found
    (tmp_path / "run.json").write_text(json.dumps(data))
    assert main(["run", str(tmp_path / "run.json"), "--dry-run"]) == 2
    assert "is a sequence classifier" in capsys.readouterr().err
