"""PPO with a critic: what it learns, when the policy moves, what a checkpoint keeps, what is refused."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_toy as toy
from posttune.config.load import load_config
from posttune.errors import ConfigError, Interrupted, UserError
from posttune.run.dry_run import dry_run
from posttune.run.stages import InterruptFlag
from posttune.testing.tiny import tiny_model
from posttune.trainer.rl_step import RlWork
from posttune.trainer.stage import Setup

pytestmark = pytest.mark.slow

CRITIC = {"optimizer": {"lr": 1e-2}}


def ppo(task: Path, **fields: Any) -> dict[str, Any]:
    base = {"advantage": {"name": "gae"}, "critic": CRITIC, "batch": {"mini_batches": 2}}
    return toy.rl(task, **toy.merged(base, fields))


def ready(output: Path, stage: dict[str, Any], stack: ExitStack) -> tuple[Setup, RlWork]:
    setup = toy.prepared(output, stage, stack)
    assert isinstance(setup.work, RlWork)
    return setup, setup.work


def critic_weights(work: RlWork) -> dict[str, torch.Tensor]:
    assert work.critic is not None
    return {name: param.detach().clone() for name, param in work.critic.loaded.model.named_parameters()}


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(before[name], after[name]) for name in before)


def test_the_critic_comes_to_explain_the_returns(task: Path, tmp_path: Path) -> None:
    stage = ppo(
        task,
        optimizer={"lr": 0.0},
        critic={"optimizer": {"lr": 3e-3}},
        batch={"prompts": 16, "mini_batches": 4, "epochs": 2},
        steps=20,
    )
    with ExitStack() as stack:
        setup, _ = ready(tmp_path, stage, stack)
        found = toy.take_steps(setup, 16)
    assert found[0]["value/mean"] == 0.0  # a new head says 0
    assert found[0]["value/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    explained = [each["value/explained_variance"] for each in found]
    assert sum(explained[-4:]) / 4 > 0.1 + sum(explained[:4]) / 4
    assert found[-1]["value/mean"] == pytest.approx(found[-1]["value/return_mean"], abs=0.1)
    keys = {"loss/value", "value/clip_fraction", "value/grad_norm", "value/lr", "time/critic_s"}
    assert all(each.keys() >= keys for each in found)


def test_while_it_warms_up_the_policy_stays(task: Path, tmp_path: Path) -> None:
    stage = ppo(task, critic={"warmup_steps": 2}, optimizer={"warmup_steps": 2}, steps=5)
    with ExitStack() as stack:
        setup, work = ready(tmp_path, stage, stack)
        policy, critic = toy.weights(setup), critic_weights(work)
        found = toy.take_steps(setup, 2)
        assert not moved(policy, toy.weights(setup))
        assert moved(critic, critic_weights(work))
        position = toy.Position(step=2, consumed=8)
        third = work.step(position).metrics
        assert moved(policy, toy.weights(setup))
    assert [each["lr"] for each in found] == [0.0, 0.0]
    assert third["lr"] == pytest.approx(0.5e-3)  # its schedule begins now
    assert all(each.keys() >= {"entropy", "rollout/logprob_gap_mean"} for each in found)
    assert all("loss/policy" not in each for each in found)


def test_any_split_over_micro_batches_gives_the_same_critic(task: Path, tmp_path: Path) -> None:
    found = []
    for tokens in (8192, 24):
        with ExitStack() as stack:
            stage = ppo(task, packing={"micro_batch_tokens": tokens}, critic={"optimizer": {"eps": 1e-3}})
            setup, work = ready(tmp_path, stage, stack)
            metrics = toy.take_steps(setup, 2)[-1]
            found.append((metrics, critic_weights(work)))
    for name in ("loss/value", "value/grad_norm", "value/clip_fraction", "value/explained_variance"):
        assert found[0][0][name] == pytest.approx(found[1][0][name], rel=1e-4, abs=1e-5), name
    for name, weight in found[0][1].items():
        assert torch.allclose(weight, found[1][1][name], atol=1e-4), name


def test_its_passes_are_the_policys_unless_it_says_otherwise(task: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        _, work = ready(tmp_path, ppo(task, critic={"epochs": 3}), stack)
        assert work.critic is not None
        passes = work.critic.passes
        assert (passes.epochs, passes.mini_batches) == (3, 2)
        assert (work.updater.passes.epochs, work.updater.passes.mini_batches) == (1, 2)


def test_an_interrupted_run_with_a_critic_goes_on_bit_for_bit(task: Path, tmp_path: Path) -> None:
    stage = ppo(
        task,
        steps=4,
        batch={"prompts": 6, "epochs": 2},
        kl={"where": "reward", "coef": 0.05, "estimator": "k1"},
        critic={"warmup_steps": 1, "model": str(task / "model")},
    )
    toy.run_stage(tmp_path / "whole", stage)
    for _ in range(2):
        flag = InterruptFlag()
        flag.set()
        with pytest.raises(Interrupted):
            toy.run_stage(tmp_path / "parts", stage, interrupt=flag, resume=(tmp_path / "parts").exists())
    toy.run_stage(tmp_path / "parts", stage, resume=True)
    toy.assert_same_run(tmp_path / "whole", tmp_path / "parts", 4)
    parts = json.loads((tmp_path / "whole/checkpoints/global_step_4/parts.json").read_text())
    assert list(parts) == ["critic"]


@pytest.mark.parametrize(
    ("fields", "path", "what"),
    [
        ({"critic": None}, "advantage.name", "critic"),
        ({"advantage": {"name": "grpo"}}, "critic", "uses no critic"),
        ({"critic": {"warmup_steps": 3}}, "critic.warmup_steps", "never learn"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_start(
    task: Path, tmp_path: Path, fields: dict[str, Any], path: str, what: str
) -> None:
    stage = ppo(task, **fields)
    with pytest.raises(ConfigError) as caught:
        toy.run_stage(tmp_path, stage)
    assert [(each.path, what in each.message) for each in caught.value.problems] == [
        (f"stages.rl.{path}", True)
    ]
    loaded = load_config({"output": str(tmp_path / "run"), "stages": {"rl": stage}})
    problems = dry_run(loaded).problems
    assert [(each.path, what in each.message) for each in problems] == [(f"stages.rl.{path}", True)]


def test_a_model_that_is_not_there_is_found_by_a_dry_run(task: Path, tmp_path: Path) -> None:
    stage = ppo(task, critic={"model": "no/such/folder"})
    problems = dry_run(load_config({"output": str(tmp_path / "run"), "stages": {"rl": stage}})).problems
    assert [each.path for each in problems] == ["stages.rl.critic.model"]


def test_a_critic_of_other_tokens_is_refused(task: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other", hidden=32, heads=2, head_dim=16)
    edited = json.loads((other / "tokenizer.json").read_text())
    vocabulary = edited["model"]["vocab"]
    first, second = sorted(vocabulary, key=lambda token: vocabulary[token])[65:67]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(edited))
    with pytest.raises(UserError, match="tokenizer is not the policy's"):
        toy.run_stage(tmp_path / "run", ppo(task, critic={"model": str(other)}))
