"""What watches over a run: alarms, the best checkpoint, and the contract of estimators."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_toy as toy
from posttune.advantage.plugins import GRPO
from posttune.checkpoint import store
from posttune.config.checkpoints import BestConfig
from posttune.errors import ConfigError, Interrupted, PluginReturnError, RunError
from posttune.run.stages import InterruptFlag
from posttune.trainer._alarms import Alarms, Rule
from posttune.trainer.loop import Position, StepOutput
from posttune.trainer.sft import SftWork
from posttune.types import AdvantageBatch, Advantages

pytestmark = pytest.mark.slow

ENTROPY = Rule("entropy", "entropy", limit=0.5, above=False, patience=2)


def test_an_alarm_rings_after_its_patience_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    alarms = Alarms([ENTROPY])
    rings = []
    with caplog.at_level(logging.WARNING):
        for value in (1.0, 0.4, 0.3, 0.2, 0.9, 0.1, 0.1):
            found, stop = alarms.look({"entropy": value})
            assert stop is None
            rings.append(found["alarm/entropy"])
    assert rings == [0, 0, 1, 1, 0, 0, 1]
    assert [each.message for each in caplog.records] == [
        "alarm entropy: entropy is below 0.5 for 2 steps in a row; now 0.3",
        "alarm entropy: entropy is below 0.5 for 2 steps in a row; now 0.1",
    ]


def test_its_count_goes_on_after_a_resume_and_a_step_without_the_metric_keeps_it() -> None:
    first, second = Alarms([ENTROPY]), Alarms([ENTROPY])
    first.look({"entropy": 0.1})
    second.load_state_dict(first.state_dict())
    assert second.look({})[0] == {"alarm/entropy": 0.0}
    assert second.look({"entropy": 0.1})[0] == {"alarm/entropy": 1.0}


@pytest.mark.parametrize(
    ("alarms", "name"),
    [
        ({"entropy_below": 99.0}, "entropy"),
        ({"reward_std_below": 99.0}, "reward_std"),
        ({"length_above": 0.5}, "length_above"),
        ({"length_below": 99.0}, "length_below"),
    ],
)
def test_a_collapse_can_end_the_run_with_a_checkpoint(
    task: Path, tmp_path: Path, alarms: dict[str, float], name: str
) -> None:
    stage = toy.rl(task, alarms=alarms | {"patience": 2, "on_alarm": "stop"}, steps=5)
    with pytest.raises(RunError, match=f"alarm {name}: .*2 steps in a row"):
        toy.run_stage(tmp_path, stage)
    assert [line[f"alarm/{name}"] for line in toy.metrics(tmp_path)] == [0.0, 1.0]
    assert (tmp_path / "checkpoints/global_step_2/COMPLETE").is_file()


def validated(task: Path, **fields: Any) -> dict[str, Any]:
    evaluate = {
        "every": 1,
        "data": {"path": str(task / "data"), "limit": 8},
        "rewards": [{"name": "function", "options": {"path": f"{task / 'rewards.py'}:seen"}}],
        "sampling": {"max_new_tokens": 3},
    }
    return toy.sft(task, evaluate=evaluate, **fields)


def test_the_best_checkpoint_is_kept_beside_the_last(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttune.trainer.validation import Validation

    scores = iter([0.1, 0.5, 0.5, 0.3, 0.2, 0.4])
    monkeypatch.setattr(Validation, "run", lambda self: {"val/accuracy": next(scores)})
    checkpoint = {"every": 1, "keep_last": 1, "keep_best": "val/accuracy"}
    result = toy.run_stage(tmp_path, validated(task, steps=6, checkpoint=checkpoint))
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["global_step_2", "global_step_6"]
    assert store.what_is_missing(tmp_path / "checkpoints/global_step_2") is None
    assert (result.metrics["best/val/accuracy"], result.metrics["best/global_step"]) == (0.5, 2)


def test_a_new_best_is_saved_when_no_checkpoint_is_due(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttune.trainer.validation import Validation

    scores = iter([0.1, 0.0, 0.5, 0.5])
    monkeypatch.setattr(Validation, "run", lambda self: {"val/accuracy": next(scores)})
    toy.run_stage(tmp_path, validated(task, steps=4, checkpoint={"keep_best": "val/accuracy"}))
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["global_step_1", "global_step_3", "global_step_4"]


def test_a_metric_that_no_validation_gives_is_refused(task: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no validation gives 'val/acuracy'") as caught:
        toy.run_stage(tmp_path, validated(task, checkpoint={"keep_best": "val/acuracy"}))
    assert caught.value.problems[0].suggestion == "val/accuracy"
    with pytest.raises(ConfigError, match="has no validation"):
        toy.run_stage(tmp_path, toy.sft(task, checkpoint={"keep_best": "val/accuracy"}))


def with_nan(values: torch.Tensor) -> torch.Tensor:
    return values * torch.nan


def too_short(values: torch.Tensor) -> torch.Tensor:
    return values[:-1]


def never_zero(values: torch.Tensor) -> torch.Tensor:
    return values + 1.0


@pytest.mark.parametrize(
    ("broken", "what"),
    [(with_nan, "not finite"), (too_short, "shape"), (never_zero, "not 0 where the mask is False")],
)
def test_an_estimator_that_breaks_its_contract_ends_the_run_by_name(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Any, what: str
) -> None:
    from posttune.advantage import functions

    grpo = functions.grpo

    def worse(batch: AdvantageBatch, **options: Any) -> Advantages:
        return Advantages(broken(grpo(batch, **options).advantages))

    monkeypatch.setattr(functions, "grpo", worse)
    (tmp_path / "mine.py").write_text(
        "def score(prompt, response):\n    return None if len(response) % 2 else float(len(response))\n"
    )
    reward = {"name": "function", "options": {"path": f"{tmp_path / 'mine.py'}:score"}}
    with pytest.raises(PluginReturnError, match=rf"grpo.*{what}") as caught:
        toy.run_stage(tmp_path / "run", toy.rl(task, rewards=[reward], advantage={"name": "grpo"}))
    assert "posttune" in str(caught.value)  # the distribution
    assert GRPO.__module__ == "posttune.advantage.plugins"


@pytest.mark.parametrize("best", [{"metric": "val/accuracy", "mode": "min"}, {"metric": "val/accuracy"}])
def test_which_way_is_better(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: dict[str, str]
) -> None:
    from posttune.trainer.validation import Validation

    scores = iter([0.3, 0.2, 0.5, 0.4])
    monkeypatch.setattr(Validation, "run", lambda self: {"val/accuracy": next(scores)})
    checkpoint = {"every": 1, "keep_last": 1, "keep_best": best}
    result = toy.run_stage(tmp_path, validated(task, steps=4, checkpoint=checkpoint))
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    step = 2 if "mode" in best else 3
    assert kept == [f"global_step_{step}", "global_step_4"]
    assert result.metrics["best/global_step"] == step


def test_a_loss_is_better_when_it_is_lower() -> None:
    assert BestConfig(metric="val/loss").sign == -1
    assert BestConfig(metric="val/accuracy").sign == 1
    assert BestConfig(metric="val/loss", mode="max").sign == 1
    assert not BestConfig(metric="val/loss").better(2.0, 1.0)
    assert BestConfig(metric="val/loss").better(2.0, None)


def test_the_best_one_is_remembered_over_a_restart(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttune.trainer.validation import Validation

    scores = iter([0.1, 0.5, 0.2, 0.3, 0.4])
    monkeypatch.setattr(Validation, "run", lambda self: {"val/accuracy": next(scores)})
    stage = validated(
        task,
        steps=5,
        checkpoint={"every": 1, "keep_last": 1, "keep_best": "val/accuracy", "async_save": True},
    )
    flag, step = InterruptFlag(), SftWork.step

    def stops(self: SftWork, position: Position) -> StepOutput:
        if position.step == 2:
            flag.set()
        return step(self, position)

    monkeypatch.setattr(SftWork, "step", stops)
    with pytest.raises(Interrupted, match="after step 3 of 5"):
        toy.run_stage(tmp_path, stage, interrupt=flag)
    monkeypatch.setattr(SftWork, "step", step)
    result = toy.run_stage(tmp_path, stage, resume=True)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["global_step_2", "global_step_5"]
    assert (result.metrics["best/val/accuracy"], result.metrics["best/global_step"]) == (0.5, 2)
