"""Every knob of PPO changes what it names, in training itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import api_task
import pyarrow.parquet as pq
import pytest
import torch
from posttune import PPOTrainer
from posttune.errors import DataError, UserError

pytestmark = pytest.mark.slow

SEEN = [{"name": "jsonl"}, {"name": "rollouts"}]


def trained(api: Path, output: Path, epochs: int = 1, **config: Any) -> tuple[PPOTrainer, dict[str, float]]:
    """A trainer after some passes of three steps, and the last pass's metrics."""
    trainer = api_task.ppo(api, output, observers=SEEN, **config)
    metrics = [trainer.train_epoch() for _ in range(epochs)]
    trainer.close()
    return trainer, metrics[-1]


def rows(output: Path, step: int) -> list[dict[str, Any]]:
    """The samples of a step."""
    found: list[dict[str, Any]] = pq.read_table(output / "rollouts" / f"step_{step:06d}.parquet").to_pylist()
    return found


def lines(output: Path) -> list[dict[str, Any]]:
    """The metrics of every step."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def parts(trainer: PPOTrainer) -> Any:
    """The RL work inside."""
    return trainer._rl


def updates(optimizer: torch.optim.Optimizer) -> int:
    """How many steps an AdamW has taken."""
    return int(next(iter(optimizer.state.values()))["step"])


def moved(trainer: PPOTrainer, before: dict[str, torch.Tensor]) -> bool:
    """Whether the policy has changed."""
    return any(not torch.equal(value, before[name]) for name, value in api_task.weights(trainer).items())


def test_batch_size_is_the_prompts_of_a_step(api: Path, tmp_path: Path) -> None:
    trained(api, tmp_path / "a")
    trained(api, tmp_path / "b", training={"batch_size": 5})
    assert [len(rows(tmp_path / "a", step)) for step in (1, 2, 3)] == [4, 4, 2]
    assert [len(rows(tmp_path / "b", step)) for step in (1, 2)] == [5, 5]


def test_a_pass_answers_every_prompt_once(api: Path, tmp_path: Path) -> None:
    trained(api, tmp_path, epochs=2)
    found = [
        [row["prompt"] for step in steps for row in rows(tmp_path, step)] for steps in ((1, 2, 3), (4, 5, 6))
    ]
    assert [len(set(prompts)) for prompts in found] == [10, 10]
    assert sorted(found[0]) == sorted(found[1])
    assert found[0] != found[1]  # another order


def test_num_epochs_and_mini_batches_are_optimiser_steps(api: Path, tmp_path: Path) -> None:
    trainer, _ = trained(api, tmp_path, training={"num_epochs": 3, "mini_batch_size": 2})
    # The last batch of a pass has two prompts: each is a part of its own.
    assert updates(parts(trainer).updater.stepper.optimizer) == 3 * (2 + 2 + 2)
    assert updates(parts(trainer).critic.stepper.optimizer) == 3 * (2 + 2 + 2)


def test_lr_moves_the_policy(api: Path, tmp_path: Path) -> None:
    trainer = api_task.ppo(api, training={"lr": 0.0, "critic_lr": 1e-3})
    before, critic = api_task.weights(trainer), parts(trainer).critic.loaded.model.score.weight.clone()
    metrics = trainer.train_epoch()
    assert not moved(trainer, before)
    assert not torch.equal(parts(trainer).critic.loaded.model.score.weight, critic)
    assert (metrics["lr"], metrics["value/lr"]) == (0.0, 1e-3)


def test_critic_lr_moves_the_critic(api: Path) -> None:
    trainer = api_task.ppo(api, training={"critic_lr": 0.0})
    before, critic = api_task.weights(trainer), parts(trainer).critic.loaded.model.score.weight.clone()
    trainer.train_epoch()
    assert moved(trainer, before)
    assert torch.equal(parts(trainer).critic.loaded.model.score.weight, critic)


def test_critic_warmup_keeps_the_policy(api: Path) -> None:
    trainer = api_task.ppo(api, training={"critic_warmup_steps": 3})
    before = api_task.weights(trainer)
    trainer.train_epoch()
    assert not moved(trainer, before)
    trainer.train_epoch()
    assert moved(trainer, before)


@pytest.mark.parametrize("clip", [1e-4, 0.0])
def test_grad_clip_bounds_the_gradient(api: Path, clip: float) -> None:
    trainer = api_task.ppo(api, training={"grad_clip": clip, "batch_size": 10})  # one step a pass
    norm = trainer.train_epoch()["grad_norm"]
    states = parts(trainer).updater.stepper.optimizer.state.values()
    momentum = torch.linalg.vector_norm(torch.stack([state["exp_avg"].norm() for state in states]))
    assert norm > 1e-3
    assert float(momentum) == pytest.approx(0.1 * (clip or norm), rel=1e-3)  # 1 - beta1 of it


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.5), (0.9, 0.0)])
def test_gamma_and_lam_shape_the_advantages(api: Path, tmp_path: Path, gamma: float, lam: float) -> None:
    algorithm = {"gamma": gamma, "lam": lam, "kl_coef": 0.0, "whiten": False}
    trained(api, tmp_path, algorithm=algorithm, training={"batch_size": 10})
    for row in rows(tmp_path, 1):  # the first values are 0, so the advantage is the decayed reward
        last = len(row["completion_ids"]) - 1
        expected = [row["reward"] * (gamma * lam) ** (last - place) for place in range(last + 1)]
        assert row["advantage"] == pytest.approx(expected, abs=1e-6)


def test_whiten_centres_the_advantages(api: Path, tmp_path: Path) -> None:
    trained(api, tmp_path, training={"batch_size": 10})
    found = torch.tensor([value for row in rows(tmp_path, 1) for value in row["advantage"]])
    assert float(found.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(found.std()) == pytest.approx(1.0, abs=1e-3)


def test_clip_ratio_bounds_the_ratio(api: Path, tmp_path: Path) -> None:
    training = {"num_epochs": 4, "lr": 1e-2}
    _, narrow = trained(api, tmp_path / "a", training=training, algorithm={"clip_ratio": 0.001})
    _, wide = trained(api, tmp_path / "b", training=training, algorithm={"clip_ratio": 0.9})
    assert narrow["clip_fraction"] > 0.2 > wide["clip_fraction"]


def test_kl_coef_lowers_the_reward_of_a_token(api: Path, tmp_path: Path) -> None:
    for name, coef in (("a", 0.0), ("b", 2.0)):
        config = {"algorithm": {"kl_coef": coef, "whiten": False}, "training": {"lr": 1e-2}}
        trained(api, tmp_path / name, **config)
    first = [[row["advantage"] for row in rows(tmp_path / name, 1)] for name in "ab"]
    second = [[row["advantage"] for row in rows(tmp_path / name, 2)] for name in "ab"]
    assert first[0] == first[1]  # the policy is the reference still
    assert second[0] != second[1]
    assert [line["kl_coef"] for line in lines(tmp_path / "b")] == [2.0, 2.0, 2.0]


def test_kl_where_none_measures_nothing(api: Path) -> None:
    assert "kl" not in api_task.ppo(api, algorithm={"kl_where": "none"}).train_epoch()


def test_entropy_coef_adds_a_term(api: Path) -> None:
    without = api_task.ppo(api).train_epoch()
    with_it = api_task.ppo(api, algorithm={"entropy_coef": 0.5}).train_epoch()
    assert "loss/entropy" not in without
    assert with_it["loss/entropy"] == pytest.approx(-0.5 * with_it["entropy"], rel=0.05)


def test_value_clip_bounds_the_critic(api: Path) -> None:
    training = {"num_epochs": 3, "critic_lr": 0.1}
    assert api_task.ppo(api, training=training, algorithm={"value_clip": 1e-4}).train_epoch()[
        "value/clip_fraction"
    ]
    assert "value/clip_fraction" not in api_task.ppo(api, algorithm={"value_clip": None}).train_epoch()


def test_rollout_options_shape_the_answers(api: Path, tmp_path: Path) -> None:
    rollout = {"max_new_tokens": 3, "n": 2, "top_k": 1}
    trained(api, tmp_path, rollout=rollout, training={"batch_size": 10})
    found = rows(tmp_path, 1)
    assert len(found) == 20
    assert {len(row["completion_ids"]) for row in found} <= {1, 2, 3}
    assert all(a["completion"] == b["completion"] for a, b in zip(found[::2], found[1::2], strict=True))


def test_temperature_sharpens_the_answers(api: Path) -> None:
    warm = api_task.ppo(api, rollout={"temperature": 1.0}).train_epoch()
    cold = api_task.ppo(api, rollout={"temperature": 0.05}).train_epoch()
    assert cold["entropy"] < warm["entropy"] - 0.5


def test_seed_changes_the_answers(api: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        trained(api, tmp_path / name, training={"seed": seed})
    texts = {name: [row["completion"] for row in rows(tmp_path / name, 1)] for name in "abc"}
    assert texts["a"] == texts["b"] != texts["c"]


def test_data_options_choose_the_rows(api: Path, tmp_path: Path) -> None:
    trained(api, tmp_path, data={"shuffle": False, "limit": 6})
    prompts = [row["prompt"] for step in (1, 2) for row in rows(tmp_path, step)]
    assert prompts == [f"{number}+1=" for number in range(6)]
    with pytest.raises(DataError, match="longer than 2 tokens"):
        api_task.ppo(api, data={"max_prompt_length": 2})


def test_warmup_and_schedule_move_the_lr(api: Path, tmp_path: Path) -> None:
    training = {"lr": 1e-3, "warmup_steps": 2, "schedule": "linear", "total_epochs": 2}
    trained(api, tmp_path, epochs=2, training=training)
    found = [line["lr"] for line in lines(tmp_path)]
    assert found == pytest.approx([5e-4, 1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_total_epochs_ends_the_training(api: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = api_task.ppo(api, training={"total_epochs": 2}, observers=[{"name": "console"}])
    trainer.train_epoch()
    assert "PPO step 3/6, reward: " in capsys.readouterr().out
    trainer.train_epoch()
    with pytest.raises(UserError, match="all 2 passes"):
        trainer.train_epoch()


def test_checkpoints_come_as_often_as_asked(api: Path, tmp_path: Path) -> None:
    trained(api, tmp_path / "a", epochs=2)
    trained(api, tmp_path / "b", epochs=2, training={"save_every": 1, "keep_last": 2})
    found = {name: sorted(p.name for p in (tmp_path / name / "checkpoints").iterdir()) for name in "ab"}
    assert found == {"a": ["global_step_3", "global_step_6"], "b": ["global_step_5", "global_step_6"]}
