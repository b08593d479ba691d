"""The nested dict of a trainer: every key checked, every key at its place in the run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from posttune.config.models import RlStage
from posttune.config.trainer_options import GRPOOptions, PPOOptions, TrainerOptions
from posttune.config.trainer_problems import fields_of, read_options
from posttune.errors import ConfigError, UserError


def stage_of(config: Any, options: type[TrainerOptions] = PPOOptions) -> RlStage:
    """The stage that a config means."""
    stage = read_options(options, config).stage()
    stage |= {"model": "m", "data": {"path": "d", **stage.get("data", {})}, "rewards": [{"name": "gsm8k"}]}
    return RlStage.model_validate({**stage, "steps": 1})


PLACES = [
    ("training", "batch_size", 12, "batch.prompts"),
    ("training", "num_epochs", 3, "batch.epochs"),
    ("training", "lr", 3e-4, "optimizer.lr"),
    ("training", "lr", 3e-4, "critic.optimizer.lr"),
    ("training", "critic_lr", 2e-4, "critic.optimizer.lr"),
    ("training", "grad_clip", 0.3, "optimizer.grad_clip"),
    ("training", "grad_clip", 0.3, "critic.optimizer.grad_clip"),
    ("training", "weight_decay", 0.1, "optimizer.weight_decay"),
    ("training", "betas", [0.8, 0.9], "optimizer.betas"),
    ("training", "eps", 1e-6, "optimizer.eps"),
    ("training", "warmup_steps", 7, "optimizer.warmup_steps"),
    ("training", "critic_warmup_steps", 5, "critic.warmup_steps"),
    ("training", "min_lr_ratio", 0.5, "optimizer.min_lr_ratio"),
    ("training", "micro_batch_tokens", 256, "packing.micro_batch_tokens"),
    ("training", "save_every", 9, "checkpoint.every"),
    ("training", "keep_last", 2, "checkpoint.keep_last"),
    ("training", "async_save", True, "checkpoint.async_save"),
    ("algorithm", "gamma", 0.9, "advantage.options.gamma"),
    ("algorithm", "lam", 0.8, "advantage.options.lam"),
    ("algorithm", "whiten", False, "advantage.options.whiten"),
    ("algorithm", "value_clip", 0.4, "critic.clip_range"),
    ("algorithm", "value_clip", None, "critic.clip_range"),
    ("algorithm", "loss", "gspo", "loss.name"),
    ("algorithm", "loss_options", {"dual_clip": None}, "loss.options"),
    ("algorithm", "clip_ratio", 0.15, "loss.options.clip_ratio"),
    ("algorithm", "clip_low", 0.1, "loss.options.clip_low"),
    ("algorithm", "clip_high", 0.3, "loss.options.clip_high"),
    ("algorithm", "aggregation", "token_sum", "loss.aggregation"),
    ("algorithm", "entropy_coef", 0.01, "loss.entropy_coef"),
    ("algorithm", "kl_coef", 0.5, "kl.coef"),
    ("algorithm", "kl_where", "loss", "kl.where"),
    ("algorithm", "kl_estimator", "k2", "kl.estimator"),
    ("rollout", "name", "vllm", "rollout.name"),
    ("rollout", "options", {"x": 1}, "rollout.options"),
    ("rollout", "n", 3, "rollout.sampling.n"),
    ("rollout", "temperature", 0.7, "rollout.sampling.temperature"),
    ("rollout", "top_p", 0.9, "rollout.sampling.top_p"),
    ("rollout", "top_k", 40, "rollout.sampling.top_k"),
    ("rollout", "max_new_tokens", 32, "rollout.sampling.max_new_tokens"),
    ("rollout", "stop", ["\n"], "rollout.sampling.stop"),
    ("rollout", "seed", 4, "rollout.sampling.seed"),
    ("rollout", "memory_share", 0.5, "rollout.resources.memory_share"),
    ("rollout", "tensor_parallel_size", 2, "rollout.resources.tensor_parallel_size"),
    ("rollout", "max_sequences", 99, "rollout.resources.max_sequences"),
    ("reward", "manager", "mine", "reward_manager.name"),
    ("reward", "manager_options", {"a": 1}, "reward_manager.options"),
    ("data", "shuffle", False, "data.shuffle"),
    ("data", "limit", 3, "data.limit"),
    ("data", "max_prompt_length", 8, "max_prompt_length"),
]


@pytest.mark.parametrize(("section", "key", "value", "place"), PLACES)
def test_every_option_has_its_place_in_the_stage(section: str, key: str, value: Any, place: str) -> None:
    found: Any = stage_of({section: {key: value}}).model_dump()
    for name in place.split("."):
        found = found[name]
    assert found == value


def test_the_table_above_has_every_option() -> None:
    elsewhere = {  # asserted below, or of the run rather than the stage
        "training.mini_batch_size", "training.total_epochs", "training.schedule", "training.output_dir",
        "training.seed", "training.device", "training.threads", "algorithm.kl_ctrl", "algorithm.kl_target",
        "algorithm.kl_horizon", "reward.weights", "reward.execution",
        "reward.execution_of", "observers",
    }  # fmt: skip
    assert {path for path, _ in fields_of(PPOOptions)} == elsewhere | {f"{s}.{k}" for s, k, _, _ in PLACES}


def test_what_is_not_given_is_as_in_a_configuration() -> None:
    plain = RlStage(model="m", data="d", rewards=[{"name": "gsm8k"}], steps=1)  # type: ignore[list-item]
    stage = stage_of({})
    assert stage.optimizer == plain.optimizer
    assert stage.rollout == plain.rollout
    assert stage.batch == plain.batch
    assert stage.loss == plain.loss
    assert (stage.kl.where, stage.kl.estimator, stage.advantage.name) == ("reward", "k1", "gae")


def test_mini_batches_are_parts_of_the_batch() -> None:
    assert stage_of({"training": {"batch_size": 12, "mini_batch_size": 3}}).batch.mini_batches == 4
    for training in ({"batch_size": 12, "mini_batch_size": 5}, {"mini_batch_size": 5}):
        with pytest.raises(ConfigError, match="mini_batch_size"):
            stage_of({"training": training})


def test_an_adaptive_controller_has_a_target() -> None:
    assert stage_of({"algorithm": {"kl_ctrl": "fixed"}}).kl.target is None
    kl = stage_of({"algorithm": {"kl_ctrl": "adaptive"}}).kl
    assert (kl.target, kl.horizon) == (0.03, 10_000)
    own = stage_of({"algorithm": {"kl_ctrl": "adaptive", "kl_target": 0.1, "kl_horizon": 50}}).kl
    assert (own.target, own.horizon) == (0.1, 50)
    with pytest.raises(ConfigError, match="kl_ctrl: adaptive"):
        stage_of({"algorithm": {"kl_target": 0.1}})


def test_grpo_has_groups_and_no_critic() -> None:
    stage = stage_of({"training": {"lr": 1e-4}}, GRPOOptions)
    assert (stage.critic, stage.rollout.sampling.n, stage.advantage.name) == (None, 8, "grpo")
    assert (stage.kl.where, stage.kl.estimator) == ("loss", "k3")
    with pytest.raises(ConfigError, match="PPOTrainer"):
        stage_of({"training": {"critic_lr": 1e-4}}, GRPOOptions)
    with pytest.raises(ConfigError, match=r"config\.algorithm\.gamma: unknown key"):
        stage_of({"algorithm": {"gamma": 0.9}}, GRPOOptions)


@pytest.mark.parametrize(
    ("config", "path", "suggestion"),
    [
        ({"training": {"batchsize": 4}}, "config.training.batchsize", "batch_size"),
        ({"trainning": {}}, "config.trainning", "training"),
        ({"algorithm": {"clip_ration": 0.1}}, "config.algorithm.clip_ration", "clip_ratio"),
        ({"rollout": {"max_tokens": 4}}, "config.rollout.max_tokens", "max_new_tokens"),
        ({"training": {"kl_coef": 0.1}}, "config.training.kl_coef", "algorithm.kl_coef"),
        ({"lr": 0.1}, "config.lr", "training.lr"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(config: Any, path: str, suggestion: str) -> None:
    with pytest.raises(UserError) as caught:
        read_options(PPOOptions, config)
    (problem,) = caught.value.problems  # type: ignore[attr-defined]
    assert (problem.path, problem.suggestion) == (path, suggestion)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"training": {"batch_size": "16"}}, "must be an integer, not the text '16'"),
        ({"training": {"batch_size": 0}}, "must be greater than 0"),
        ({"training": {"lr": -1.0}}, "must be at least 0"),
        ({"training": {"schedule": "cosine"}}, "needs total_epochs"),
        ({"algorithm": {"lam": 1.5}}, "must be at most 1"),
        ({"algorithm": {"kl_ctrl": "adaptiv"}}, "must be one of fixed, adaptive"),
        ({"training": None}, "config.training"),
        ([], "must be a dict of sections, not a list"),
    ],
)
def test_a_wrong_value_is_refused(config: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_options(PPOOptions, config)
    assert words in str(caught.value)


def test_all_problems_come_together() -> None:
    with pytest.raises(ConfigError) as caught:
        read_options(PPOOptions, {"training": {"lr": "x", "grad_clip": -1}, "rollout": {"tempreature": 1}})
    assert len(caught.value.problems) == 3


def test_the_documentation_names_every_option() -> None:
    text = (Path(__file__).parents[3] / "docs" / "python_api.md").read_text(encoding="utf-8")
    table = text[text.index("## Options") :]
    named = set(re.findall(r"`([a-z_]+)`", table))
    known = {
        path.rpartition(".")[2] for options in (PPOOptions, GRPOOptions) for path, _ in fields_of(options)
    }
    assert known <= named
