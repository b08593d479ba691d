"""Rewards as Python objects: what may be given, how they are called, and how they weigh."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import api_task
import pytest
from posttune import BaseRewardFunction, hookimpl
from posttune.config.base import Strict
from posttune.config.trainer_options import RewardOptions
from posttune.errors import ConfigError, DataError, PluginCallError, PluginContractError, UserError
from posttune.reward.managers import WeightedSum, WeightedSumConfig
from posttune.reward.objects import GivenRewards, given_rewards
from posttune.types import Sample

SAMPLES = [
    Sample(id=str(number), group="g", prompt="p", response="ab" * number, reference="abab")
    for number in (1, 2, 3)
]


def length(response: str) -> float:
    return float(len(response))


def quality(prompt: str, response: str) -> dict[str, float]:
    return {"factuality": 1.0, "fluency": len(response) / 2}


class Exact(BaseRewardFunction):
    class Config(Strict):
        bonus: float = 1.0

    def compute_reward(self, prompt: str, response: str, reference: Any = None, **columns: Any) -> float:
        return self.config.bonus * (response == reference)


class Batch:
    """A plugin without a base class."""

    @hookimpl
    def reward_score(self, samples: Sequence[Sample]) -> list[float]:
        return [float(len(samples))] * len(samples)


def made(reward: object, weights: Mapping[str, Any] | None = None, **options: Any) -> GivenRewards:
    return given_rewards(reward, RewardOptions.model_validate({"weights": weights or {}, **options}))


def totals(given: GivenRewards) -> list[float | None]:
    """The rewards that training would see."""
    manager = WeightedSum(WeightedSumConfig(weights=given.weights))
    return [each.value for each in manager.reward_manager_combine(SAMPLES, given.rewards.score(SAMPLES))]


@pytest.mark.parametrize(
    ("reward", "labels", "expected"),
    [
        (length, ("length",), [2.0, 4.0, 6.0]),
        (lambda prompt, response: len(response), ("reward",), [2.0, 4.0, 6.0]),
        (lambda samples: [1.0] * len(samples), ("reward",), [1.0, 1.0, 1.0]),
        (Exact(), ("Exact",), [0.0, 1.0, 0.0]),
        (Exact(bonus=3.0), ("Exact",), [0.0, 3.0, 0.0]),
        (Exact().compute_reward, ("compute_reward",), [0.0, 1.0, 0.0]),
        (Batch(), ("Batch",), [3.0, 3.0, 3.0]),
        (quality, ("quality",), [2.0, 3.0, 4.0]),
        ([length, Exact()], ("length", "Exact"), [2.0, 5.0, 6.0]),
        ([(length, 0.5), (Exact(), 2)], ("length", "Exact"), [1.0, 4.0, 3.0]),
        ({"short": (length, -1.0), "right": Exact()}, ("short", "right"), [-2.0, -3.0, -6.0]),
    ],
    ids=range(11),
)
def test_what_may_be_given(reward: Any, labels: tuple[str, ...], expected: list[float]) -> None:
    given = made(reward)
    assert given.rewards.labels == labels
    assert tuple(ref.tag for ref in given.refs) == labels
    assert totals(given) == expected


def test_an_installed_reward_goes_by_its_name() -> None:
    given = made(["gsm8k", (length, 0.1)], {"gsm8k": 2.0})
    assert given.rewards.labels == ("gsm8k", "length")
    assert given.refs[0].name == "gsm8k"
    assert given.weights == {"gsm8k": 2.0, "length": 0.1}


async def later(response: str) -> float:
    return 1.0


def test_a_reward_may_be_async() -> None:
    assert totals(made(later)) == [1.0, 1.0, 1.0]


def test_weights_go_by_label_or_by_dimension() -> None:
    assert totals(made([length, Exact()], {"length": 0.5, "Exact": 10.0})) == [1.0, 12.0, 3.0]
    assert totals(made(length, {"length": 0.5})) == [1.0, 2.0, 3.0]
    assert totals(made(quality, {"factuality": 1.0, "fluency": 0.0})) == [1.0, 1.0, 1.0]
    nested = made({"q": quality, "l": length}, {"q": {"factuality": 2.0, "fluency": 1.0}, "l": 0.5})
    assert totals(nested) == [4.0, 6.0, 8.0]


@pytest.mark.parametrize(
    ("reward", "weights", "error", "words"),
    [
        ([length], {"lenght": 1.0}, ConfigError, "did you mean 'length'"),
        ([(length, 1.0)], {"length": 1.0}, ConfigError, "keep one of the two"),
        (quality, {"factuality": {"a": 1.0}}, ConfigError, "each is a number"),
        ([length, length], {}, UserError, "2 rewards are called 'length'"),
        ([(length, "x")], {}, UserError, r"\(reward, weight\)"),
        ([], {}, UserError, "names no reward"),
        (Exact, {}, UserError, r"reward_fn=Exact\(\)"),
        (7, {}, UserError, "a int judges nothing"),
        (lambda prompt: 1.0, {}, UserError, "takes no response"),
        ({"gsm8k": ("gsm8k", {"a": 1.0})}, {}, UserError, "one number as weight"),
    ],
    ids=range(10),
)
def test_what_is_refused(reward: Any, weights: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        made(reward, weights)


def test_a_misspelt_hook_is_refused() -> None:
    class Misspelt:
        @hookimpl
        def reward_score(self, smaples: Sequence[Sample]) -> list[float]:
            return []

    with pytest.raises(PluginContractError, match="smaples"):
        made(Misspelt())


def test_a_reward_is_recorded_as_a_configuration_would_name_it() -> None:
    by_name = {ref.tag: ref for ref in made({"f": length, "e": Exact(bonus=2.0)}).refs}
    assert by_name["f"].options == {"path": f"{__name__}:length"}
    assert by_name["e"].options == {"path": f"{__name__}:Exact", "bonus": 2.0}


def test_an_installed_reward_is_recorded_by_its_name() -> None:
    from posttune.reward.length import LengthReward

    (ref,) = made(LengthReward(LengthReward.Config(limit=9))).refs
    assert (ref.name, ref.options["limit"]) == ("length", 9)


def test_dimensions_are_logged_and_weighted(api: Path) -> None:
    weights = {"factuality": 0.5, "fluency": 2.0}
    metrics = api_task.ppo(api, reward_fn=quality, reward={"weights": weights}).train_epoch()
    assert metrics["reward/quality/factuality/mean"] == 1.0
    expected = 0.5 + 2.0 * metrics["reward/quality/fluency/mean"]
    assert metrics["reward"] == pytest.approx(expected)


def test_several_rewards_are_logged_and_weighted(api: Path) -> None:
    given = {"long": (length, 0.1), "letters": api_task.letters}
    metrics = api_task.ppo(api, reward_fn=given, reward={"weights": {"letters": 3.0}}).train_epoch()
    expected = 0.1 * metrics["reward/long/mean"] + 3.0 * metrics["reward/letters/mean"]
    assert metrics["reward"] == pytest.approx(expected)


def test_columns_and_reference_reach_a_reward_by_name(api: Path) -> None:
    seen = []

    def reward(response: str, reference: str, level: int) -> float:
        seen.append((reference, level))
        return 0.0

    api_task.ppo(api, reward_fn=reward).train_epoch()
    assert sorted(seen, key=lambda pair: pair[1]) == [(f"#### {n + 1}", n) for n in range(10)]


def test_a_column_that_the_data_lacks_is_refused_at_once(api: Path) -> None:
    with pytest.raises(DataError, match=r"needs the column 'levle'.*did you mean 'level'"):
        api_task.ppo(api, reward_fn=lambda response, levle: 0.0)


def test_an_error_of_a_reward_names_it(api: Path) -> None:
    def wrong(prompt: str, response: str) -> float:
        return 1 / 0

    with pytest.raises(PluginCallError, match=r"reward 'wrong'.*ZeroDivisionError"):
        api_task.ppo(api, reward_fn=wrong).train_epoch()


PROCESS = {"executor": "process", "workers": 1, "timeout": 60.0}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of the user's, which the script imports."""
    (tmp_path / "given_by_module.py").write_text(
        "import os\n"
        "from posttune import BaseRewardFunction\n"
        "def pid(response): return float(os.getpid())\n"
        "def hang(response):\n    while response: pass\n"
        "class Plain(BaseRewardFunction):\n"
        "    def compute_reward(self, prompt, response): return float(os.getpid())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("given_by_module")
    del sys.modules["given_by_module"]


def test_a_function_of_a_module_runs_in_a_process(module: Any) -> None:
    for reward in (module.pid, module.Plain(), module.Plain().compute_reward):
        given = made(reward, execution=PROCESS)
        (scores,) = given.rewards.score(SAMPLES).values()
        (pids,) = given.rewards.pids.values()
        assert scores == [float(pids[0])] * 3
        assert given.refs[0].executor == "process"
        given.rewards.close()


def test_each_reward_has_its_own_execution(module: Any) -> None:
    limits = {"executor": "process", "workers": 1, "timeout": 0.3, "on_error": "mask"}
    given = made({"slow": module.hang, "quick": length}, execution_of={"slow": limits})
    assert given.rewards.score(SAMPLES[:2]) == {"slow": [None, None], "quick": [2.0, 4.0]}
    assert given.rewards.stats["slow"].timeouts == 2
    assert [ref.executor for ref in given.refs] == ["process", "inline"]
    given.rewards.close()


def test_a_process_is_refused_where_it_could_not_make_the_reward() -> None:
    for reward, what in (
        (lambda response: 1.0, "made as the script runs"),
        (Exact(bonus=3.0), "holds a state that no worker process could make again"),
        (Batch(), "no worker process could make again"),
    ):
        with pytest.raises(UserError, match=what) as caught:
            made(reward, execution=PROCESS)
        assert "executor: thread" in str(caught.value)
    with pytest.raises(ConfigError, match=r"config\.reward\.execution_of\.lenght.*did you mean 'length'"):
        made(length, execution_of={"lenght": PROCESS})


def test_that_the_scripts_own_cannot_be_killed_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttune.reward.objects._said", threading.Event())
    made(length)
    assert caplog.text == ""
    for _ in range(2):
        made(lambda response: 1.0)
    assert caplog.text.count("cannot be killed") == 1
