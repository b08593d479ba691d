"""Prompts whose rewards are all equal: dropped, replaced up to a bound, and counted."""

from __future__ import annotations

import logging
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trainer_toy as toy
from posttune.errors import ConfigError, Interrupted
from posttune.run.stages import InterruptFlag
from posttune.trainer._collect import Answers, Collector

pytestmark = pytest.mark.slow


def stage(task: Path, reward: str = "rare", **fields: Any) -> dict[str, Any]:
    return toy.rl(
        task,
        rewards=[{"name": "function", "options": {"path": f"{task / 'rewards.py'}:{reward}"}}],
        **fields,
    )


def rewards_by_prompt(table: Any) -> dict[str, set[float]]:
    found: dict[str, set[float]] = defaultdict(set)
    for row in table.to_pylist():
        found[row["prompt_id"]].add(row["reward"])
    return dict(found)


def test_a_step_is_refilled_from_the_stream_within_its_bound(
    task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        toy.run_stage(tmp_path, stage(task, dynamic_sampling={"max_refills": 2}, steps=4))
    lines, tables = toy.metrics(tmp_path), list(toy.rollouts(tmp_path).values())
    next_prompt = 0
    for line, table in zip(lines, tables, strict=True):
        groups = rewards_by_prompt(table)
        assert len(groups) == line["rollout/groups_kept"] <= 4
        assert all(len(rewards) > 1 for rewards in groups.values())
        assert line["rollout/refills"] == 2 or line["rollout/groups_kept"] == 4
        assert all(int(prompt) >= next_prompt for prompt in groups)
        next_prompt = max(map(int, groups), default=next_prompt) + 1
    assert any(line["rollout/refills"] > 0 for line in lines)
    assert all(0 < line["rollout/constant_groups_fraction"] < 1 for line in lines)
    short = [line for line in lines if line["rollout/groups_kept"] < 4]
    assert len([each for each in caplog.records if "goes on with" in each.message]) == len(short)


def test_the_position_counts_what_refills_took(task: Path, tmp_path: Path) -> None:
    seen: list[Answers] = []
    with ExitStack() as stack:
        setup = toy.prepared(tmp_path, stage(task, dynamic_sampling={"max_refills": 2}), stack)
        chosen = Collector._chosen
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Collector, "_chosen", lambda *a: seen.append(chosen(*a)) or seen[-1])
            position = toy.Position()
            for _ in range(3):
                position = position.after(setup.work.step(position).rows)
    assert position.consumed == sum(each.taken for each in seen) > 12
    ids = [int(name) for each in seen for name in each.prompts.all_ids]
    assert ids == sorted(set(ids))  # no prompt twice, and none from before
    assert all(each.taken <= 12 for each in seen)


def test_a_resume_goes_on_behind_the_refills(task: Path, tmp_path: Path) -> None:
    made = stage(task, dynamic_sampling={"max_refills": 2}, batch={"mini_batches": 2}, steps=3)
    toy.run_stage(tmp_path / "whole", made)
    flag = InterruptFlag()
    flag.set()
    with pytest.raises(Interrupted):
        toy.run_stage(tmp_path / "parts", made, interrupt=flag)
    toy.run_stage(tmp_path / "parts", made, resume=True)
    toy.assert_same_run(tmp_path / "whole", tmp_path / "parts", 3)


def test_dropped_prompts_count_in_no_mean(task: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        plain = toy.take_steps(toy.prepared(tmp_path, stage(task), stack), 1)[0]
    with ExitStack() as stack:
        setup = toy.prepared(tmp_path, stage(task, batch={"drop_constant_groups": True}), stack)
        dropped = toy.take_steps(setup, 1)[0]
    share = plain["rollout/constant_groups_fraction"]
    assert 0 < share < 1
    assert dropped["rollout/constant_groups_fraction"] == share
    assert dropped["rollout/groups_kept"] == pytest.approx(4 * (1 - share))
    assert dropped["grad_norm"] > plain["grad_norm"]  # the same sum over fewer tokens
    assert dropped["reward/mean"] == plain["reward/mean"]  # of everything that was answered
    assert (plain["update/skipped_fraction"], dropped["update/skipped_fraction"]) == (share, 0.0)


@pytest.mark.parametrize("estimator", ["grpo", "remax", "reinforce_plus_plus", "gae"])
def test_a_step_without_any_prompt_left_changes_nothing(task: Path, tmp_path: Path, estimator: str) -> None:
    critic = {"critic": {}} if estimator == "gae" else {}
    reward = [{"name": "length", "options": {"limit": 99}}]  # 1 for every answer
    made = toy.rl(
        task, rewards=reward, dynamic_sampling={"max_refills": 1}, advantage={"name": estimator}, **critic
    )
    with ExitStack() as stack:
        setup = toy.prepared(tmp_path, made, stack)
        before = toy.weights(setup)
        (found,) = toy.take_steps(setup, 1)
        after = toy.weights(setup)
    assert found["rollout/groups_kept"] == 0
    assert found["rollout/constant_groups_fraction"] == 1.0
    assert all(before[name].equal(after[name]) for name in before)
    toy.run_stage(tmp_path / "run", made)
    assert len(toy.metrics(tmp_path / "run")) == 3


@pytest.mark.parametrize(
    "fields", [{"dynamic_sampling": {}}, {"batch": {"drop_constant_groups": True}}], ids=["refill", "drop"]
)
def test_one_sample_a_prompt_is_refused(task: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    made = toy.rl(task, advantage={"name": "reinforce_plus_plus"}, rollout={"sampling": {"n": 1}}, **fields)
    with pytest.raises(ConfigError, match="every prompt would be dropped"):
        toy.run_stage(tmp_path, made)
