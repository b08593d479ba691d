"""Log-probabilities of the engine that differ from the trainer's: measured, made up for, and an alarm."""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trainer_toy as toy
from posttune.errors import ConfigError, RunError, UserError
from posttune.trainer.rl import check_logprobs
from posttune.trainer.rl_step import RlWork
from posttune.types import BackendInfo, Completion


def skewed(monkeypatch: pytest.MonkeyPatch, by: float) -> None:
    """Let the engine report log-probabilities that are off: every first token by ``by``."""
    from posttune.facade import RolloutEngine

    generate = RolloutEngine.generate

    def off(self: RolloutEngine, *args: Any, **kwargs: Any) -> list[Completion]:
        found = generate(self, *args, **kwargs)
        return [_shifted(completion, by) for completion in found]

    monkeypatch.setattr(RolloutEngine, "generate", off)


def _shifted(completion: Completion, by: float) -> Completion:
    from dataclasses import replace

    if completion.logprobs is None:
        return completion
    first, *rest = completion.logprobs
    return replace(completion, logprobs=(first - by, *rest))


def one_step(output: Path, stage: dict[str, Any]) -> dict[str, float]:
    with ExitStack() as stack:
        setup = toy.prepared(output, stage, stack)
        assert isinstance(setup.work, RlWork)
        return toy.take_steps(setup, 1)[0]


def test_the_gap_and_the_effective_share_of_samples_are_measured(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = one_step(tmp_path, toy.rl(task))
    assert exact["rollout/effective_sample_size"] == pytest.approx(1.0, abs=1e-5)
    skewed(monkeypatch, 1.0)
    # a reward that differs from sample to sample: every sequence is looked at
    off = one_step(tmp_path, toy.rl(task, kl={"where": "loss"}, rollout={"sampling": {"max_new_tokens": 2}}))
    share = off["rollout/logprob_gap_mean"]  # of the tokens, those that are off by 1
    weights, squares = share * math.e + 1 - share, share * math.e**2 + 1 - share
    assert off["rollout/logprob_gap_max"] == pytest.approx(1.0, abs=1e-4)
    assert off["rollout/effective_sample_size"] == pytest.approx(weights**2 / squares, rel=1e-3)


@pytest.mark.parametrize(
    ("correction", "mean"),
    [
        ("truncated_token", lambda share: share * 1.5 + 1 - share),
        ("truncated_sequence", lambda share: 1.5),
        ("mask_token", lambda share: 1 - share),
        ("mask_sequence", lambda share: 0.0),
    ],
)
def test_corrections_weigh_the_loss(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, correction: str, mean: Any
) -> None:
    skewed(monkeypatch, 1.0)
    stage = toy.rl(task, kl={"where": "loss", "coef": 0.0}, mismatch={"correction": correction, "cap": 1.5})
    found = one_step(tmp_path, stage)
    share = found["rollout/logprob_gap_mean"]
    assert found["rollout/correction_mean"] == pytest.approx(mean(share), rel=1e-3)
    assert (found["grad_norm"] == 0.0) == (correction == "mask_sequence")


def test_without_a_gap_a_correction_changes_nothing(task: Path, tmp_path: Path) -> None:
    plain = one_step(tmp_path, toy.rl(task))
    weighed = one_step(tmp_path, toy.rl(task, mismatch={"correction": "truncated_sequence"}))
    assert weighed["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
    assert weighed["rollout/correction_mean"] == pytest.approx(1.0, abs=1e-4)


def test_the_alarm_warns_once_or_ends_the_run_with_a_checkpoint(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    skewed(monkeypatch, 1.0)
    with caplog.at_level(logging.WARNING):
        toy.run_stage(tmp_path / "warned", toy.rl(task, mismatch={"alarm": 0.05}))
    assert [line["alarm/logprob_gap"] for line in toy.metrics(tmp_path / "warned")] == [1.0] * 3
    assert len([each for each in caplog.records if "alarm logprob_gap" in each.message]) == 1
    with pytest.raises(RunError, match=r"alarm logprob_gap.*above 0.05"):
        toy.run_stage(tmp_path / "ended", toy.rl(task, mismatch={"alarm": 0.05, "on_alarm": "stop"}))
    assert (tmp_path / "ended/checkpoints/global_step_1/COMPLETE").is_file()


def test_an_engine_without_log_probabilities_cannot_be_compared(task: Path) -> None:
    from posttune.config.models import RlStage

    silent = BackendInfo("silent", logprobs="none")
    check_logprobs(RlStage.model_validate(toy.rl(task)), silent)
    with pytest.raises(UserError, match="silent gives no log-probabilities"):
        check_logprobs(RlStage.model_validate(toy.rl(task, mismatch={"alarm": 1.0})), silent)


def test_a_floor_above_the_cap_is_refused(task: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="above the cap"):
        toy.run_stage(tmp_path, toy.rl(task, mismatch={"correction": "mask_token", "floor": 3.0}))
