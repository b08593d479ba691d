"""RL: what a step computes, and what it leaves."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_toy as toy
from posttune.trainer._batch import RolloutBatch
from posttune.trainer._passes import Knobs
from posttune.trainer._update import Objective, Updater
from posttune.trainer.rl_step import RlWork
from posttune.trainer.stage import Setup

pytestmark = pytest.mark.slow

KEYS = {
    "stage", "step", "global_step", "time/step_s", "time/rollout_s", "time/reward_s", "time/update_s",
    "time/sync_s", "reward/mean", "reward/std", "reward/function/mean", "entropy", "loss/policy",
    "clip_fraction", "grad_norm", "lr", "tokens/completion", "tokens_per_s", "update/padding_fraction",
    "update/tokens_per_row", "update/attention_waste", "rollout/logprob_gap_mean",
    "rollout/logprob_gap_max", "rollout/weight_version", "memory/peak_mb", "update/skipped_fraction",
}  # fmt: skip
COLUMNS = [
    "step", "prompt_id", "prompt", "completion", "prompt_ids", "completion_ids", "logprobs",
    "finish_reason", "weight_version", "reward", "reward/function", "advantage", "reference",
]  # fmt: skip


def ready(output: Path, stage: dict[str, Any], stack: ExitStack) -> tuple[Setup, RlWork]:
    setup = toy.prepared(output, stage, stack)
    assert isinstance(setup.work, RlWork)
    return setup, setup.work


def trained(output: Path, stage: dict[str, Any], steps: int = 2) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Metrics and weights after some steps."""
    with ExitStack() as stack:
        setup, _ = ready(output, stage, stack)
        return toy.take_steps(setup, steps), toy.weights(setup)


def assert_equal_weights(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], atol: float = 0.0
) -> None:
    for name, weight in one.items():
        assert torch.allclose(weight, other[name], rtol=0, atol=atol), name


def test_a_run_leaves_metrics_rollouts_checkpoint_and_model(task: Path, tmp_path: Path) -> None:
    result = toy.run_stage(tmp_path, toy.rl(task, batch={"mini_batches": 2}))
    lines, tables = toy.metrics(tmp_path), toy.rollouts(tmp_path)
    assert lines[0].keys() >= KEYS
    assert "kl" not in lines[0]
    assert [line["rollout/weight_version"] for line in lines] == [0, 1, 2]
    assert list(tables) == [f"step_{step:06d}.parquet" for step in (1, 2, 3)]
    assert (tmp_path / "checkpoints" / "global_step_3" / "COMPLETE").is_file()
    assert result.output == tmp_path / "models" / "rl"
    table = tables["step_000002.parquet"]
    assert table.column_names == COLUMNS
    for row in table.to_pylist():
        tokens = len(row["completion_ids"])
        assert len(row["advantage"]) == len(row["logprobs"]) == tokens
        assert (row["step"], row["weight_version"]) == (2, 1)
        assert row["prompt_id"] in {"4", "5", "6", "7"}
        assert row["reward"] == row["reward/function"]


def test_the_trainer_agrees_with_the_engine_at_any_temperature(task: Path, tmp_path: Path) -> None:
    """Ratio 1 on the first step: the sampling temperature applies to the trainer's log-probabilities."""
    sampling = {"temperature": 0.7}
    stage = toy.rl(task, rollout={"sampling": sampling}, batch={"mini_batches": 2}, optimizer={"lr": 0.0})
    found, _ = trained(tmp_path, stage)
    for each in found:
        assert each["rollout/logprob_gap_max"] < 1e-4
        assert each["clip_fraction"] == 0.0
        assert abs(each["approx_kl"]) < 1e-6


def test_ids_of_the_rollout_are_the_training_ids(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[RolloutBatch] = []
    update = Updater.update

    def watched(self: Updater, batch: RolloutBatch, *args: Any, **kwargs: Any) -> None:
        seen.append(batch)
        update(self, batch, *args, **kwargs)

    monkeypatch.setattr(Updater, "update", watched)
    toy.run_stage(tmp_path, toy.rl(task, steps=1))
    (table,) = toy.rollouts(tmp_path).values()
    rows = table.to_pylist()
    assert [list(sequence.ids) for sequence in seen[0].sequences] == [
        row["prompt_ids"] + row["completion_ids"] for row in rows
    ]
    assert any("�" in row["completion"] for row in rows)  # decoding and encoding again would change these


@pytest.mark.parametrize("batch", [{}, {"mini_batches": 2, "epochs": 2}])
def test_the_first_update_of_a_step_needs_no_second_pass(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: dict[str, int]
) -> None:
    stage = toy.rl(task, batch=batch)
    found, saved = trained(tmp_path, stage, 2)
    monkeypatch.setattr(Updater, "first_rows", lambda *_: set())
    again, computed = trained(tmp_path, stage, 2)
    assert_equal_weights(
        saved, computed, atol=1e-4 if batch else 0.0
    )  # bit-equal where passes are packed alike
    for one, other in zip(found, again, strict=True):
        for name in ("entropy", "rollout/logprob_gap_mean", "loss/policy", "clip_fraction", "approx_kl"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


def test_sequences_without_advantage_are_left_out_exactly(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, left_out = trained(tmp_path, toy.rl(task, batch={"mini_batches": 2}), 3)
    assert any(each["update/skipped_fraction"] > 0 for each in found)
    monkeypatch.setattr(Objective, "advantage_only", False)
    again, everything = trained(tmp_path, toy.rl(task, batch={"mini_batches": 2}), 3)
    assert all(each["update/skipped_fraction"] == 0 for each in again)
    assert_equal_weights(left_out, everything, atol=2e-5)
    for one, other in zip(found, again, strict=True):
        assert one["loss/policy"] == pytest.approx(other["loss/policy"], abs=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    "aggregation",
    ["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_sum_norm", "seq_mean_token_mean"],
)
def test_any_split_over_micro_batches_gives_the_same(task: Path, tmp_path: Path, aggregation: str) -> None:
    stage = toy.rl(
        task,
        loss={"aggregation": aggregation, "entropy_coef": 0.01},
        kl={"where": "loss", "coef": 0.1},
        batch={"mini_batches": 2, "epochs": 2},
    )
    whole, first = trained(tmp_path, stage, 1)
    split, second = trained(tmp_path, toy.merged(stage, {"packing": {"micro_batch_tokens": 24}}), 1)
    for key in ("loss/policy", "loss/kl", "loss/entropy", "entropy", "kl", "grad_norm", "clip_fraction"):
        assert whole[0][key] == pytest.approx(split[0][key], rel=1e-4, abs=1e-6), key
    assert_equal_weights(first, second, atol=1e-4)


def test_mini_batches_are_whole_prompts_each_once_in_a_seeded_order(task: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        _, work = ready(tmp_path, toy.rl(task, batch={"prompts": 5, "mini_batches": 2}), stack)
        ids = [str(number) for number in range(5)]

        def parts(step: int, epoch: int) -> list[set[Any]]:
            return list(work.updater.passes.parts(Knobs(step, ids, lr=0.0, kl_coef=0.0), epoch))

        first = parts(0, 0)
        assert [len(part) for part in first] == [2, 3]
        assert sorted(name for part in first for name in part) == ids
        assert first == parts(0, 0)
        assert any(parts(step, epoch) != first for step in range(3) for epoch in range(3))


def test_a_learning_rate_of_zero_keeps_policy_and_reference_together(task: Path, tmp_path: Path) -> None:
    stage = toy.rl(task, kl={"where": "loss"}, optimizer={"lr": 0.0}, batch={"mini_batches": 2})
    found, _ = trained(tmp_path, stage, 4)
    assert all(abs(each["kl"]) < 1e-9 for each in found)
    assert all(abs(each["approx_kl"]) < 1e-6 for each in found)


def disturb(setup: Setup) -> None:
    """Move the policy away from its reference."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in setup.loaded.model.parameters():
            if param.requires_grad:
                param += 0.2 * torch.randn(param.shape, generator=generator)


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_a_run_on_kl_alone_lowers_it(task: Path, tmp_path: Path, where: str) -> None:
    stage = toy.rl(
        task,
        rewards=[{"name": "length", "options": {"limit": 99}}],  # 1 for every answer
        advantage={"name": "rloo" if where == "reward" else "grpo"},
        kl={"where": where, "coef": 1.0, "estimator": "k1" if where == "reward" else "k3"},
        rollout={"sampling": {"n": 16}},
        optimizer={"lr": 1e-2},
    )
    with ExitStack() as stack:
        setup, _ = ready(tmp_path, stage, stack)
        disturb(setup)
        found = [each["kl"] for each in toy.take_steps(setup, 14)]
    assert sum(found[-3:]) < 0.75 * sum(found[:3])


def test_with_adapters_the_reference_is_the_model_without_them(task: Path, tmp_path: Path) -> None:
    model = {"path": str(task / "model"), "lora": {"rank": 4}}
    stage = toy.rl(task, model=model, kl={"where": "loss"}, optimizer={"lr": 0.0})
    with ExitStack() as stack:
        setup, work = ready(tmp_path, stage, stack)
        assert work.reference is not None
        (before,) = toy.take_steps(setup, 1)
        disturb(setup)
        (after,) = toy.take_steps(setup, 1)
    assert abs(before["kl"]) < 1e-9
    assert after["kl"] > 0.005


def test_kl_in_the_reward_is_taken_off_at_each_token(task: Path, tmp_path: Path) -> None:
    stage = toy.rl(task, kl={"where": "reward", "coef": 0.5, "estimator": "k1"})
    with ExitStack() as stack:
        setup, work = ready(tmp_path, stage, stack)
        disturb(setup)
        asked: list[Any] = []
        compute = work.estimator.compute
        work.estimator.compute = lambda batch: asked.append(batch) or compute(batch)  # type: ignore[method-assign]
        looked_back: list[RolloutBatch] = []
        update = work.updater.update
        work.updater.update = lambda batch, *a, **k: looked_back.append(batch) or update(batch, *a, **k)  # type: ignore[method-assign]
        toy.take_steps(setup, 1)
    (batch,), (seen,) = asked, looked_back
    assert seen.ref_logp is not None
    penalty = 0.5 * (seen.old_logp - seen.ref_logp).double()
    ends = seen.packed.cu_seqlens[1:].long() - 1
    inner = torch.ones(len(penalty), dtype=torch.bool)
    inner[ends] = False
    assert torch.allclose(batch.token_rewards[inner], -penalty[inner])
    assert batch.token_rewards.sum().item() == pytest.approx(batch.scores.sum().item())


def test_an_adaptive_coefficient_moves_and_a_fixed_one_stays(task: Path, tmp_path: Path) -> None:
    kl = {"where": "loss", "coef": 0.1}
    fixed, _ = trained(tmp_path, toy.rl(task, kl=kl))
    moved, _ = trained(tmp_path, toy.rl(task, kl=kl | {"target": 0.5, "horizon": 100}), 3)
    assert [each["kl_coef"] for each in fixed] == [0.1, 0.1]
    assert moved[1]["kl_coef"] == pytest.approx(0.1 * (1 - 0.2 * 16 / 100))  # 16 samples, KL far below target
    assert moved[2]["kl_coef"] < moved[1]["kl_coef"]


@pytest.mark.parametrize(
    "estimator", ["dr_grpo", "rloo", "reinforce_plus_plus", "remax", "opo", "gpg", "grpo_passk", "gdpo"]
)
def test_every_estimator_without_a_critic_trains(task: Path, tmp_path: Path, estimator: str) -> None:
    found, _ = trained(tmp_path, toy.rl(task, advantage={"name": estimator}), 1)
    assert found[0]["grad_norm"] > 0


def test_adapters_alone_are_trained(task: Path, tmp_path: Path) -> None:
    stage = toy.rl(task, model={"path": str(task / "model"), "lora": {"rank": 4}}, optimizer={"lr": 1e-2})
    with ExitStack() as stack:
        setup, _ = ready(tmp_path, stage, stack)
        before = toy.weights(setup)
        found = toy.take_steps(setup, 3)
        after = toy.weights(setup)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all(".lora_" in name for name in moved)
    assert all(each["rollout/logprob_gap_max"] < 1e-3 for each in found)
