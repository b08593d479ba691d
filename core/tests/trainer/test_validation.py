"""An evaluation in the middle of training, and the early end that it may bring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trainer_toy as toy
from posttune.errors import ConfigError
from posttune.trainer.checks import validation_metrics

pytestmark = pytest.mark.slow


def validated(task: Path, stage: dict[str, Any], **fields: Any) -> dict[str, Any]:
    rewards = [{"name": "function", "options": {"path": f"{task / 'rewards.py'}:seen"}}]
    sampling = {"max_new_tokens": 3, "temperature": 0.0}
    base = {
        "every": 2,
        "data": {"path": str(task / "data"), "limit": 10},
        "rewards": rewards,
        "sampling": sampling,
    }
    return toy.merged(stage, {"evaluate": toy.merged(base, fields)})


@pytest.mark.parametrize("make", [toy.sft, toy.rl])
def test_it_comes_every_so_many_steps(task: Path, tmp_path: Path, make: Any) -> None:
    toy.run_stage(tmp_path, validated(task, make(task, steps=5)))
    lines = toy.metrics(tmp_path)
    assert [line["step"] for line in lines if "val/accuracy" in line] == [2, 4]
    assert all("time/validation_s" in line for line in lines if "val/accuracy" in line)


def test_the_stage_ends_once_the_metric_is_reached_and_stays_ended(task: Path, tmp_path: Path) -> None:
    stop = {"metric": "val/accuracy", "at_least": 0.1}
    stage = validated(task, toy.sft(task, steps=200, optimizer={"lr": 1e-2}), stop=stop)
    result = toy.run_stage(tmp_path, stage)
    last = toy.metrics(tmp_path)[-1]
    assert last["step"] == result.metrics["steps"] < 200
    assert last["val/accuracy"] >= 0.1
    assert (tmp_path / "checkpoints" / f"global_step_{last['step']}" / "COMPLETE").is_file()
    again = toy.run_stage(tmp_path, stage, resume=True)
    assert again.metrics["steps"] == last["step"]
    assert toy.metrics(tmp_path)[-1] == last


def test_it_changes_nothing_in_the_training(task: Path, tmp_path: Path) -> None:
    stage = toy.rl(task, steps=4)
    toy.run_stage(tmp_path / "without", stage)
    toy.run_stage(tmp_path / "with", validated(task, stage, sampling={"temperature": 1.0}))
    without, watched = toy.metrics(tmp_path / "without"), toy.metrics(tmp_path / "with")
    for one, other in zip(without, watched, strict=True):
        assert toy.comparable(one) == {
            name: value for name, value in toy.comparable(other).items() if not name.startswith("val/")
        }


def test_a_metric_that_no_validation_gives_is_refused(task: Path, tmp_path: Path) -> None:
    stage = validated(task, toy.sft(task), stop={"metric": "val/acuracy", "at_least": 0.5})
    with pytest.raises(ConfigError) as caught:
        toy.run_stage(tmp_path, stage)
    (problem,) = caught.value.problems
    assert (problem.path, problem.suggestion) == ("stages.sft.evaluate.stop.metric", "val/accuracy")


def test_the_metrics_that_may_end_a_stage_are_those_that_there_are(task: Path, tmp_path: Path) -> None:
    long = {"name": "length", "label": "long", "options": {"limit": 2}}
    seen = {"name": "function", "options": {"path": f"{task / 'rewards.py'}:seen"}}
    stage = validated(task, toy.sft(task), rewards=[seen, long], sampling={"n": 2, "temperature": 1.0})
    toy.run_stage(tmp_path, stage)
    line = toy.metrics(tmp_path)[1]
    config = toy.context(tmp_path, {"sft": stage}, "sft").run.stages["sft"].evaluate
    assert validation_metrics(config) == ["val/accuracy", "val/pass@2", "val/reward/long/mean"]
    assert set(validation_metrics(config)) <= line.keys()
