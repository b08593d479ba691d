"""PPOTrainer and GRPOTrainer as objects: passes, metrics, the KL controller, resuming, refusing."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import api_task
import pytest
import torch
from posttune import GRPOTrainer, HFModel, PPOTrainer, SampleDataset
from posttune.checkpoint import store
from posttune.checkpoint.sources import open_source
from posttune.errors import CheckpointError, ConfigError, Interrupted, ModelError, UserError
from posttune.models import attention

pytestmark = pytest.mark.slow


def same_weights(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether they are equal to the last bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name].cpu(), other[name].cpu()) for name in one)


# --- passes and metrics ---------------------------------------------------------------------


def test_an_epoch_is_one_pass_and_returns_its_metrics(api: Path) -> None:
    trainer = api_task.ppo(api)
    assert (trainer.epoch, trainer.step) == (0, 0)
    metrics = trainer.train_epoch()
    assert (trainer.epoch, trainer.step) == (1, 3)
    assert {"reward", "reward_std", "kl", "entropy", "loss/policy", "loss/value", "lr"} <= metrics.keys()
    assert metrics["reward"] == metrics["reward/mean"] == pytest.approx(metrics["reward/letters/mean"])
    assert all(isinstance(value, int | float) for value in metrics.values())


def test_reward_is_the_mean_over_samples_not_over_steps(api: Path) -> None:
    seen: list[float] = []

    def reward(prompt: str, response: str) -> float:
        seen.append(len(response) / (1 + len(seen)))
        return seen[-1]

    metrics = api_task.ppo(api, reward_fn=reward).train_epoch()  # steps of 4, 4 and 2 samples
    assert len(seen) == 10
    assert metrics["reward"] == pytest.approx(sum(seen) / 10)
    assert metrics["reward_std"] == pytest.approx(float(torch.tensor(seen).double().std(correction=0)))


def test_samples_without_a_score_are_left_out(api: Path) -> None:
    metrics = api_task.ppo(api, reward_fn=lambda prompt, response: None).train_epoch()
    assert math.isnan(metrics["reward"])
    half = api_task.ppo(
        api, reward_fn=lambda prompt, response: 0.5 if int(prompt[0]) % 2 else None
    ).train_epoch()
    assert (half["reward"], half["reward/unscorable_fraction"]) == (0.5, 0.5)


def test_without_output_dir_nothing_is_written(
    api: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(api.rglob("*"))
    with api_task.ppo(api) as trainer:
        trainer.train_epoch()
    assert list(tmp_path.iterdir()) == []
    assert sorted(api.rglob("*")) == before


def test_the_log_has_one_line_a_step(api: Path, capsys: pytest.CaptureFixture[str]) -> None:
    api_task.ppo(api, observers=[{"name": "console"}]).train_epoch()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(", reward: ")[0] for line in lines] == [f"PPO step {step}/3" for step in (1, 2, 3)]
    assert all(" ± " in line for line in lines)


def test_training_raises_the_reward(api: Path) -> None:
    trainer = api_task.ppo(api, training={"num_epochs": 2, "lr": 3e-3, "batch_size": 10}, rollout={"n": 8})
    first = trainer.train_epoch()["reward"]
    for _ in range(12):
        last = trainer.train_epoch()["reward"]
    assert last > first + 0.1


def test_the_model_can_be_saved_and_loaded(api: Path, tmp_path: Path) -> None:
    trainer = api_task.ppo(api)
    trainer.train_epoch()
    trainer.save_model(tmp_path / "model")
    again = HFModel(tmp_path / "model").load()
    assert same_weights(again.model.state_dict(), api_task.weights(trainer))
    with pytest.raises(UserError):
        trainer.save_model(tmp_path / "model")


def test_a_checkpoint_is_a_model_source(api: Path, tmp_path: Path) -> None:
    with api_task.ppo(api, tmp_path / "out") as trainer:
        trainer.train_epoch()
    source = open_source(tmp_path / "out")
    assert same_weights(source.load_model(dtype=torch.float32).state_dict(), api_task.weights(trainer))


def test_grpo_needs_no_critic(api: Path) -> None:
    trainer = GRPOTrainer(
        api / "model", api_task.letters, api / "data", {"training": {"batch_size": 5}, "observers": []}
    )
    metrics = trainer.train_epoch()
    assert "loss/value" not in metrics
    assert {"reward", "reward_std", "kl"} <= metrics.keys()
    with pytest.raises(ConfigError, match=r"config\.algorithm\.estimator: the estimator needs a critic"):
        GRPOTrainer(api / "model", api_task.letters, api / "data", {"algorithm": {"estimator": "gae"}})


# --- models -----------------------------------------------------------------------------------


def test_models_can_carry_adapters_and_checkpointing(api: Path, tmp_path: Path) -> None:
    def make() -> PPOTrainer:
        return PPOTrainer(
            HFModel(api / "model", lora={"rank": 2}, enable_gradient_checkpointing=True),
            HFModel(api / "model", is_critic=True, enable_gradient_checkpointing=True),
            api_task.letters,
            api / "data",
            {"training": {"batch_size": 5, "output_dir": str(tmp_path)}, "observers": []},
        )

    with make() as trainer:
        trainer.train_epoch()
        trained = {name for name, param in trainer.model.named_parameters() if param.requires_grad}
        assert trained
        assert all("lora" in name for name in trained)
    with make() as again:
        assert again.epoch == 1


def test_flash_attention_is_asked_for_and_falls_back_with_one_line(
    api: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attention._say_once.cache_clear()
    assert HFModel(api / "model").config.attention == "auto"
    asked = HFModel(api / "model", use_flash_attn=True)
    assert asked.config.attention == "flash"
    with caplog.at_level(logging.WARNING):
        asked.load()
        HFModel(api / "model", use_flash_attn=True, is_critic=True).load()
    (message,) = [record.getMessage() for record in caplog.records if "flash" in record.getMessage()]
    assert message == "model.attention: sdpa instead of flash: it needs a GPU and bfloat16 or float16"


def test_models_are_checked(api: Path) -> None:
    with pytest.raises(ConfigError, match="rank"):
        HFModel(api / "model", lora={"rnk": 4})
    with pytest.raises(ConfigError, match="dtype"):
        HFModel(api / "model", dtype="float12")
    assert HFModel(api / "model", dtype=torch.bfloat16).config.dtype == "bfloat16"
    data, actor = SampleDataset(api / "data"), HFModel(api / "model")
    with pytest.raises(UserError, match="is_critic=True"):
        PPOTrainer(actor, actor, api_task.letters, data)
    with pytest.raises(UserError, match="generates nothing"):
        PPOTrainer(HFModel(api / "model", is_critic=True), api / "model", api_task.letters, data)
    with pytest.raises(ModelError, match="no such folder"):
        PPOTrainer(api / "nowhere", api / "model", api_task.letters, data)


# --- the KL controller --------------------------------------------------------------------------


def test_a_fixed_coefficient_moves_by_hand_alone(api: Path) -> None:
    trainer = api_task.ppo(api, algorithm={"kl_coef": 0.01}, training={"lr": 1e-2})
    trainer.train_epoch()
    assert trainer.kl_ctrl.coef == 0.01
    assert (trainer.kl_ctrl.target, trainer.kl_ctrl.horizon) == (0.03, 10_000)
    trainer.kl_ctrl.update(kl=1.0, step=0)
    moved = 0.01 * (1 + 0.2 * 4 / 10_000)  # n: the samples of a step
    assert trainer.kl_ctrl.coef == pytest.approx(moved, rel=1e-12)
    assert trainer.train_epoch()["kl_coef"] == pytest.approx(moved, rel=1e-12)


def test_an_adaptive_coefficient_moves_by_itself_and_a_call_warns(api: Path) -> None:
    trainer = api_task.ppo(api, algorithm={"kl_coef": 0.01, "kl_ctrl": "adaptive"})
    trainer.train_epoch()
    coef = trainer.kl_ctrl.coef
    assert coef < 0.01  # the policy has hardly moved
    with pytest.warns(UserWarning, match="by itself"):
        trainer.kl_ctrl.update(kl=1.0, step=0)
    assert trainer.kl_ctrl.coef > coef


def test_a_call_by_hand_survives_a_restart(api: Path, tmp_path: Path) -> None:
    algorithm = {"kl_coef": 0.5}
    with api_task.ppo(api, tmp_path, reward_fn=named(stops_at(11)), algorithm=algorithm) as trainer:
        trainer.train_epoch()
        trainer.kl_ctrl.update(kl=1.0, step=0)
        coef = trainer.kl_ctrl.coef
        with pytest.raises(Exception, match="Stop"):
            trainer.train_epoch()
    with api_task.ppo(api, tmp_path, algorithm=algorithm) as again:
        assert (again.step, again.kl_ctrl.coef) == (3, coef)
        assert coef > 0.5


# --- resuming -------------------------------------------------------------------------------------


class Stop(Exception):
    """Ends a pass in the middle."""


def stops_at(call: int) -> Any:
    """A reward that raises in its n-th call."""
    calls = 0

    def letters(prompt: str, response: str) -> float:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Stop
        return api_task.letters(prompt, response)

    return letters


def scripted(trainer: PPOTrainer, until: int) -> list[dict[str, float]]:
    """What a resumable script does: passes, and the controller in between."""
    found = []
    while trainer.epoch < until:
        metrics = trainer.train_epoch()
        found.append(api_task.comparable(metrics))
        trainer.kl_ctrl.update(kl=metrics["kl"], step=trainer.epoch)
    return found


@pytest.mark.parametrize("kl_ctrl", ["fixed", "adaptive"])
def test_an_interrupted_pass_is_finished_bit_by_bit(api: Path, tmp_path: Path, kl_ctrl: str) -> None:
    config: dict[str, Any] = {
        "algorithm": {"kl_ctrl": kl_ctrl, "kl_coef": 0.1},
        "training": {"save_every": 1, "num_epochs": 2},
    }
    with warnings.catch_warnings(action="ignore"):
        with api_task.ppo(api, tmp_path / "a", **config) as whole:
            expected = scripted(whole, 3)
        # The 17th sample is in the second step of the second pass.
        with api_task.ppo(api, tmp_path / "b", reward_fn=named(stops_at(17)), **config) as broken:
            with pytest.raises(Exception, match="Stop"):
                scripted(broken, 3)
            assert (broken.epoch, broken.step) == (1, 4)
        with api_task.ppo(api, tmp_path / "b", **config) as resumed:
            assert (resumed.epoch, resumed.step) == (1, 4)
            found = scripted(resumed, 3)
    assert found == expected[1:]
    assert same_weights(api_task.weights(resumed), api_task.weights(whole))
    assert resumed.kl_ctrl.coef == whole.kl_ctrl.coef
    for step in (5, 9):
        states = [store.read_state(tmp_path / name / "checkpoints" / f"global_step_{step}") for name in "ab"]
        assert states[0]["position"] == states[1]["position"]
        assert states[0]["work"]["kl_control"] == states[1]["work"]["kl_control"]


def named(function: Any) -> Any:
    """The function under the identity of the toy task's reward: a configuration names it so."""
    function.__module__, function.__qualname__ = api_task.letters.__module__, "letters"
    return function


def test_a_new_object_goes_on_where_the_last_checkpoint_is(api: Path, tmp_path: Path) -> None:
    with api_task.ppo(api, tmp_path) as trainer:
        trainer.train_epoch()
    with api_task.ppo(api, tmp_path) as again:
        assert (again.epoch, again.step) == (1, 3)
        assert same_weights(api_task.weights(again), api_task.weights(trainer))
        again.train_epoch()
        assert again.epoch == 2


def test_the_metrics_file_has_every_step_once(api: Path, tmp_path: Path) -> None:
    seen = [{"name": "jsonl"}]
    broken = api_task.ppo(api, tmp_path, reward_fn=named(stops_at(9)), observers=seen)
    with broken, pytest.raises(Exception, match="Stop"):
        broken.train_epoch()
    with api_task.ppo(api, tmp_path, observers=seen) as again:
        assert again.step == 0  # there was no checkpoint yet
        again.train_epoch()
        again.train_epoch()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_a_wish_to_stop_leaves_a_checkpoint(api: Path, tmp_path: Path) -> None:
    calls = iter(range(100))

    def letters(prompt: str, response: str) -> float:
        if next(calls) == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return 0.0

    with api_task.ppo(api, tmp_path, reward_fn=named(letters)) as trainer:
        with pytest.raises(Interrupted, match="run the script again"):
            trainer.train_epoch()
        assert trainer.step == 1
        trainer.train_epoch()  # the same object can go on too
        assert (trainer.epoch, trainer.step) == (1, 3)


# --- refusing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"training": {"lr": 2e-3}}, "optimizer.lr: 0.001 -> 0.002"),
        ({"training": {"seed": 1}}, "seed: 0 -> 1"),
        ({"algorithm": {"gamma": 0.9}}, "advantage.options.gamma"),
        ({"rollout": {"max_new_tokens": 7}}, "rollout.sampling.max_new_tokens: 6 -> 7"),
        ({"reward_fn": lambda prompt, response: 1.0}, "rewards.0"),
    ],
)
def test_a_changed_config_is_refused(api: Path, tmp_path: Path, change: Any, field: str) -> None:
    with api_task.ppo(api, tmp_path) as trainer:
        trainer.train_epoch()
    with pytest.raises(UserError) as caught:
        api_task.ppo(api, tmp_path, **change)
    assert field in str(caught.value)
    with api_task.ppo(api, tmp_path) as again:
        assert again.epoch == 1  # nothing was harmed


def test_what_changes_no_number_may_change(api: Path, tmp_path: Path) -> None:
    with api_task.ppo(api, tmp_path) as trainer:
        trainer.train_epoch()
    with api_task.ppo(api, tmp_path, training={"save_every": 1, "keep_last": 1}) as again:
        assert again.epoch == 1


def test_changed_data_is_refused(tmp_path: Path) -> None:
    api_task.make_task(tmp_path / "task")
    with api_task.ppo(tmp_path / "task", tmp_path / "out") as trainer:
        trainer.train_epoch()
    raw = tmp_path / "task" / "raw.jsonl"
    raw.write_text(raw.read_text().replace("#### 1", "#### 2"))
    (tmp_path / "task" / "data").rename(tmp_path / "old")
    api_task.convert(tmp_path / "task")
    with pytest.raises(CheckpointError, match="data has changed"):
        api_task.ppo(tmp_path / "task", tmp_path / "out")


def test_the_folder_of_another_run_is_refused(api: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="holds a run already"):
        api_task.ppo(api, tmp_path)


def test_a_folder_has_one_trainer_at_a_time(api: Path, tmp_path: Path) -> None:
    with api_task.ppo(api, tmp_path) as trainer:
        with pytest.raises(UserError, match="another process runs"):
            api_task.ppo(api, tmp_path)
        trainer.train_epoch()
    with pytest.raises(UserError, match="closed"):
        trainer.train_epoch()
