"""RL: what is refused at the start, and what happens to values that cannot be used."""

from __future__ import annotations

import json
import logging
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import trainer_toy as toy
from posttune.data.conversion import ConvertRequest, convert
from posttune.errors import ConfigError, DataError, PluginCallError, PluginReturnError, RunError
from posttune.trainer._judge import judge
from posttune.trainer.rl_step import RlWork
from posttune.types import Completion, LossBatch, LossTraits, Reward, Sample, TokenLoss


@pytest.mark.parametrize(
    ("fields", "path", "what"),
    [
        ({"rollout": {"sampling": {"n": 1}}}, "rollout.sampling.n", "at least 2"),
        ({"rollout": {"sampling": {"temperature": 0.0}}}, "rollout.sampling.temperature", "above 0"),
        ({"advantage": {"name": "gae"}}, "advantage.name", "critic"),
        ({"batch": {"mini_batches": 9}}, "batch.mini_batches", "never split"),
        ({"kl": {"where": "loss", "estimator": "k1"}}, "kl.estimator", "k1"),
        ({"epochs": 1.0}, "steps", "both steps and epochs"),
        ({"steps": None}, "steps", "neither steps nor epochs"),
    ],
)
def test_what_cannot_train_is_refused_before_a_model_loads(
    task: Path, tmp_path: Path, fields: dict[str, Any], path: str, what: str
) -> None:
    stage = toy.merged(toy.rl(task, model="no such folder"), fields)
    with pytest.raises(ConfigError) as caught:
        toy.run_stage(tmp_path, stage)
    assert [(problem.path, what in problem.message) for problem in caught.value.problems] == [
        (f"stages.rl.{path}", True)
    ]
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_singleton_policy_lets_a_group_estimator_go_on(task: Path, tmp_path: Path) -> None:
    stage = toy.rl(task, advantage={"name": "rloo", "options": {"singleton": "raw"}}, steps=1)
    toy.run_stage(tmp_path, toy.merged(stage, {"rollout": {"sampling": {"n": 1}}}))


def test_a_prompt_that_is_too_long_is_named_by_its_row(task: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "response": "2"}, {"prompt": "1" * 30, "response": "2"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    convert(ConvertRequest([tmp_path / "rows.jsonl"], tmp_path / "data", tokenizer=task / "model"))
    stage = toy.rl(task, data=str(tmp_path / "data"), max_prompt_length=20)
    with pytest.raises(DataError, match=r"1 of 2 prompts.*of 30, is row 2 of .*rows.jsonl"):
        toy.run_stage(tmp_path / "run", stage)


def test_more_tokens_than_the_model_has_positions(task: Path, tmp_path: Path) -> None:
    stage = toy.rl(task, rollout={"sampling": {"max_new_tokens": 5000}})
    with pytest.raises(DataError, match="2048 positions"):
        toy.run_stage(tmp_path, stage)


def test_truncated_sampling_warns(task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), ExitStack() as stack:
        toy.prepared(tmp_path, toy.rl(task, rollout={"sampling": {"top_p": 0.9}}), stack)
    assert "top_p 0.9" in caplog.text


class Broken:
    """A policy loss that is not a number."""

    traits = LossTraits()

    def compute(self, batch: LossBatch) -> TokenLoss:
        return TokenLoss(batch.logp * math.nan)


def test_steps_that_are_not_finite_are_skipped_and_three_in_a_row_end_the_run(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttune.trainer.rl.build_loss", lambda _: Broken())
    with pytest.raises(RunError, match="not finite in 3 steps in a row"):
        toy.run_stage(tmp_path, toy.rl(task, steps=9))
    lines = toy.metrics(tmp_path)
    assert [line["update/nonfinite_steps"] for line in lines] == [1, 1, 1]
    assert not any("loss/policy" in line or "grad_norm" in line for line in lines)
    saved = tmp_path / "checkpoints" / "global_step_3"
    assert (saved / "COMPLETE").is_file()
    assert not (tmp_path / "models").exists()


def test_what_was_skipped_left_the_weights_alone(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttune.trainer.rl.build_loss", lambda _: Broken())
    with ExitStack() as stack:
        setup = toy.prepared(tmp_path, toy.rl(task, batch={"mini_batches": 2}), stack)
        before = toy.weights(setup)
        (found,) = toy.take_steps(setup, 1)
        after = toy.weights(setup)
    assert found["update/nonfinite_steps"] == 2
    assert all(torch.equal(before[name], after[name]) for name in before)


def with_reward(task: Path, folder: Path, body: str) -> dict[str, Any]:
    (folder / "mine.py").write_text(f"import math\ndef score(prompt, response):\n    return {body}\n")
    return toy.rl(task, rewards=[{"name": "function", "options": {"path": f"{folder / 'mine.py'}:score"}}])


def test_unscorable_samples_are_masked_everywhere(task: Path, tmp_path: Path) -> None:
    body = "None if len(response) % 2 else float(len(response) > 4)"
    toy.run_stage(tmp_path, toy.merged(with_reward(task, tmp_path, body), {"steps": 2}))
    lines, tables = toy.metrics(tmp_path), toy.rollouts(tmp_path)
    rows = [row for table in tables.values() for row in table.to_pylist()]
    masked = [row for row in rows if row["reward"] is None]
    assert masked
    assert all(set(row["advantage"]) <= {0.0} for row in masked)
    shares = [line["reward/unscorable_fraction"] for line in lines]
    assert sum(shares) / 2 == pytest.approx(len(masked) / len(rows))
    scored = [row["reward"] for row in tables["step_000001.parquet"].to_pylist() if row["reward"] is not None]
    assert lines[0]["reward/mean"] == pytest.approx(sum(scored) / len(scored))


def test_a_step_with_nothing_to_score_goes_by(task: Path, tmp_path: Path) -> None:
    toy.run_stage(tmp_path, toy.merged(with_reward(task, tmp_path, "None"), {"steps": 2}))
    lines = toy.metrics(tmp_path)
    assert [line["grad_norm"] for line in lines] == [0.0, 0.0]
    assert all("reward/mean" not in line for line in lines)


@pytest.mark.parametrize(
    ("body", "error"),
    [("'good'", PluginReturnError), ("math.inf", PluginReturnError), ("1 / 0", PluginCallError)],
)
def test_a_reward_that_breaks_its_contract_ends_the_run_by_name(
    task: Path, tmp_path: Path, body: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match="function"):
        toy.run_stage(tmp_path, with_reward(task, tmp_path, body))


class Fixed:
    """Every sample scores 1."""

    stats: ClassVar[dict[str, Any]] = {}

    def score(self, samples: list[Sample]) -> dict[str, list[float]]:
        return {"one": [1.0] * len(samples)}

    def combine(self, samples: list[Sample], scores: dict[str, list[float]]) -> list[Reward]:
        return [Reward(value) for value in scores["one"]]


def test_an_answer_that_its_engine_broke_off_has_no_reward() -> None:
    samples = [
        Sample("0/0", "0", "p", "r", completion=Completion("0", 0, (5,), (0.0,), reason, 0))  # type: ignore[arg-type]
        for reason in ("stop", "length", "abort")
    ]
    judged = judge(samples, Fixed(), Fixed())  # type: ignore[arg-type]
    assert [reward.value for reward in judged.rewards] == [1.0, 1.0, None]


def test_dimensions_are_logged_and_kept_in_the_table(task: Path, tmp_path: Path) -> None:
    body = "{'long': len(response) / 6, 'odd': float(len(response) % 2)}"
    toy.run_stage(tmp_path, toy.merged(with_reward(task, tmp_path, body), {"steps": 1}))
    (line,), (table,) = toy.metrics(tmp_path), toy.rollouts(tmp_path).values()
    names = {"reward/function", "reward/function/long", "reward/function/odd"}
    assert {f"{name}/mean" for name in names} <= line.keys()
    assert names <= set(table.column_names)
    row = table.to_pylist()[0]
    assert row["reward/function"] == pytest.approx(row["reward/function/long"] + row["reward/function/odd"])


def test_the_work_of_a_stage_is_what_the_tests_take_it_for(task: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        setup = toy.prepared(tmp_path, toy.rl(task, epochs=2.0, steps=None), stack)
        assert isinstance(setup.work, RlWork)
        assert setup.total_steps == 12  # 24 prompts twice, 4 a step
