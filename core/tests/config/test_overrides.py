"""``a.b.c=value``."""

from __future__ import annotations

from typing import Any

import pytest
from posttune.config.load import load_config
from posttune.errors import ConfigError, Problem

DATA: dict[str, Any] = {
    "output": "x",
    "stages": {
        "rl": {
            "model": "models/m",
            "data": "data/d",
            "steps": 1,
            "rewards": [{"name": "format"}, {"name": "function", "label": "brevity"}],
        }
    },
}


def rl(*overrides: str) -> dict[str, Any]:
    stage: dict[str, Any] = load_config(DATA, overrides).plain()["stages"]["rl"]
    return stage


def problem(*overrides: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        load_config(DATA, overrides)
    (found,) = caught.value.problems
    return found


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("0", 0.0), ("1", 1.0)],
)
def test_values_are_yaml(text: str, value: float) -> None:
    assert rl(f"rl.optimizer.lr={text}")["optimizer"]["lr"] == value


def test_a_type_is_not_guessed() -> None:
    assert problem("rl.steps='3'").message == "must be an integer, not the text '3'"
    assert problem("rl.steps=yes").message == "must be an integer, not the text 'yes'"


def test_top_level_keys_come_first_and_stages_can_be_spelt_out() -> None:
    assert load_config(DATA, ["seed=7"]).config.seed == 7
    assert rl("stages.rl.steps=5")["steps"] == 5


def test_the_last_one_wins_and_null_clears() -> None:
    assert rl("rl.steps=5", "rl.steps=null", "rl.epochs=2")["steps"] is None


def test_an_option_of_a_plugin_needs_no_options_in_its_path() -> None:
    loss = rl("rl.loss.clip_ratio=0.15", "rl.loss.options.dual_clip=3", "rl.loss.entropy_coef=0.1")["loss"]
    assert loss["options"] == {"clip_ratio": 0.15, "dual_clip": 3}
    assert loss["entropy_coef"] == 0.1


def test_an_option_of_a_plugin_by_default_keeps_its_name() -> None:
    stage = rl("rl.reward_manager.weights={brevity: 2}", "rl.advantage.options.x=1")
    assert stage["reward_manager"]["name"] == "weighted_sum"
    assert stage["reward_manager"]["options"] == {"weights": {"brevity": 2}}
    assert stage["advantage"]["name"] == "grpo"


def test_own_fields_of_a_reference_stay_its_own() -> None:
    rollout = rl("rl.rollout.sampling.n=4", "rl.rollout.engine.x=1")["rollout"]
    assert rollout["sampling"]["n"] == 4
    assert rollout["options"] == {"engine": {"x": 1}}


def test_a_list_takes_a_number_or_a_label() -> None:
    rewards = rl("rl.rewards.0.pattern=a", "rl.rewards.brevity.path=f.py:g")["rewards"]
    assert rewards[0]["options"] == {"pattern": "a"}
    assert rewards[1]["options"] == {"path": "f.py:g"}


def test_a_path_in_short_form_becomes_a_mapping() -> None:
    assert rl("rl.model.dtype=bfloat16")["model"]["path"] == "models/m"
    assert rl("rl.data.limit=3")["data"]["path"] == "data/d"


def test_a_value_may_hold_an_equals_sign() -> None:
    assert load_config(DATA, ["name=a=b"]).config.name == "a=b"


def test_mappings_and_lists_are_values_too() -> None:
    assert rl("rl.kl={where: loss, coef: 0.1}")["kl"]["coef"] == 0.1
    assert rl("rl.rollout.sampling.stop=['\\n', x]")["rollout"]["sampling"]["stop"] == ["\\n", "x"]


@pytest.mark.parametrize(
    ("override", "path", "words", "suggestion"),
    [
        ("rll.steps=1", "rll", "no top-level key and no stage", "rl"),
        ("sede=1", "sede", "no top-level key and no stage", "seed"),
        ("rl.optimzer.lr=1", "stages.rl.optimzer", "unknown key", "optimizer"),
        ("rl.optimizer.lrr=1", "stages.rl.optimizer.lrr", "unknown key", "lr"),
        ("rl.steps", "", "a.b.c=value", ""),
        ("=1", "", "a.b.c=value", ""),
        ("rl..steps=1", "", "a.b.c=value", ""),
        ("rl.rewards.5.x=1", "stages.rl.rewards.5", "no such item; there is format, brevity", ""),
        ("rl.steps.x=1", "stages.rl.steps", "nothing can be set inside", ""),
        ("rl.kl=[1", "", "no YAML value", ""),
    ],
)
def test_a_mistake_names_the_override(override: str, path: str, words: str, suggestion: str) -> None:
    found = problem(override)
    assert found.path == path
    assert words in found.message
    assert found.suggestion == suggestion
    assert found.file == f"override {override!r}"
    assert found.line is None


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(DATA, ["rll.x=1", "rl.kl.where=lost", "rl.steps"])
    assert len(caught.value.problems) == 3
