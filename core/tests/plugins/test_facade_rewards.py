"""Rewards and managers through their facades: what comes back is checked, and blame has a label."""

from __future__ import annotations

import asyncio
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from plugin_wheels import Install, plugin
from posttune import hookimpl
from posttune.config.models import PluginRef
from posttune.errors import DataError, PluginCallError, PluginContractError, PluginReturnError
from posttune.facade import RewardManager, Rewards, build_manager, build_rewards
from posttune.pipeline import bind
from posttune.types import Completion, Needs, Reward, Sample


class Answers:
    """A reward that returns what it was made with."""

    def __init__(self, answers: Any) -> None:
        self.answers = answers

    @hookimpl
    def reward_score(self, samples: Sequence[Sample]) -> Any:
        if isinstance(self.answers, BaseException):
            raise self.answers
        return self.answers


def samples(count: int = 2) -> list[Sample]:
    return [Sample(id=f"s{i}", group=0, prompt="p", response="r" * i) for i in range(count)]


def rewards(*answers: Any) -> Rewards:
    return Rewards([bind("reward", Answers(each), f"r{i}") for i, each in enumerate(answers)])


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([1, 0.5], [1.0, 0.5]),
        ((1, None), [1.0, None]),
        ([math.nan, 2], [None, 2.0]),
        ([{"a": 1, "b": 0.5}, {"a": math.nan}], [{"a": 1.0, "b": 0.5}, None]),
        (np.array([0.5, np.nan]), [0.5, None]),
        ([np.float32(0.5), np.int64(3)], [0.5, 3.0]),
        (torch.tensor([1.0, 0.0]), [1.0, 0.0]),
    ],
)
def test_scores_become_floats_in_order(answers: Any, expected: list[Any]) -> None:
    facade = rewards(answers)
    assert facade.score(samples()) == {"r0": expected}
    assert facade.stats["r0"].unscorable == expected.count(None)


def test_nan_is_counted_apart_from_none() -> None:
    facade = rewards([math.nan, None, 1.0])
    facade.score(samples(3))
    stats = facade.stats["r0"]
    assert (stats.scored, stats.unscorable, stats.nan) == (1, 2, 1)
    assert stats.seconds >= 0


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([1.0], "1 scores for 2 samples"),
        ([1.0, 2.0, 3.0], "3 scores for 2 samples"),
        (None, "NoneType None, not a list of scores"),
        ("ab", "str 'ab', not a list of scores"),
        (0.5, "float 0.5, not a list of scores"),
        ({"s0": 1}, "dict {'s0': 1}, not a list of scores"),
        (iter([1, 2]), "not a list of scores"),
        ([1.0, "good"], "str 'good' for sample s1 (label 'r0')"),
        ([True, 0], "bool True for sample s0 (label 'r0')"),
        ([0, -math.inf], "float -inf for sample s1"),
        ([0, {}], "an empty dict for sample s1"),
        ([{"a": "b"}, 0], "str 'b' for dimension 'a' of sample s0"),
        ([{"a": True}, 0], "bool True for dimension 'a' of sample s0"),
        ([[1.0], [2.0]], "list [1.0] for sample s0"),
    ],
)
def test_what_is_no_score_is_refused(answers: Any, words: str) -> None:
    with pytest.raises(PluginReturnError) as caught:
        rewards(answers).score(samples())
    assert str(caught.value).startswith("reward 'r0': reward_score returned ")
    assert words in str(caught.value)
    assert "One number, dict of dimensions, or None (unscorable) per sample" in str(caught.value)


@pytest.mark.parametrize("error", [ValueError("bad gold"), SystemExit(1), asyncio.CancelledError()])
def test_a_reward_that_raises_is_named_with_its_samples(error: BaseException) -> None:
    with pytest.raises(PluginCallError) as caught:
        rewards(error).score(samples(3))
    message = str(caught.value)
    assert message.startswith(f"reward 'r0': reward_score raised {type(error).__name__}")
    assert "(label 'r0', 3 samples, the first is s0)" in message
    assert caught.value.__cause__ is error


def test_errors_of_posttune_and_interrupts_pass_unchanged() -> None:
    for error in (DataError("no reference", who="row 3"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            rewards(error).score(samples())
        assert caught.value is error


def test_each_reward_is_called_once_in_the_order_of_the_configuration() -> None:
    calls: list[str] = []

    class Noting:
        def __init__(self, name: str) -> None:
            self.name = name

        @hookimpl
        def reward_score(self, samples: Sequence[Sample]) -> list[float]:
            calls.append(self.name)
            return [1.0] * len(samples)

    facade = Rewards([bind("reward", Noting(name), name) for name in ("b", "a", "c")])
    assert list(facade.score(samples())) == ["b", "a", "c"]
    assert facade.labels == ("b", "a", "c")
    assert calls == ["b", "a", "c"]


def test_equal_dataclass_instances_are_two_rewards() -> None:
    @dataclass
    class Constant:
        value: float

        @hookimpl
        def reward_score(self, samples: Sequence[Sample]) -> list[float]:
            return [self.value] * len(samples)

    facade = Rewards([bind("reward", Constant(1.0), "one"), bind("reward", Constant(1.0), "two")])
    assert facade.score(samples()) == {"one": [1.0, 1.0], "two": [1.0, 1.0]}


class Eventually:
    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    @hookimpl
    async def reward_score(self, samples: Sequence[Sample]) -> list[float]:
        await asyncio.sleep(0)
        if self.error:
            raise self.error
        return [float(len(each.response)) for each in samples]


def test_an_async_reward_works_with_and_without_a_running_loop() -> None:
    facade = Rewards([bind("reward", Eventually(), "later")])
    assert facade.score(samples()) == {"later": [0.0, 1.0]}

    async def in_a_notebook() -> Any:
        return facade.score(samples())

    assert asyncio.run(in_a_notebook()) == {"later": [0.0, 1.0]}


def test_an_async_reward_that_raises_is_named() -> None:
    with pytest.raises(PluginCallError, match="'later': reward_score raised OSError: no judge"):
        Rewards([bind("reward", Eventually(OSError("no judge")), "later")]).score(samples())


def test_no_samples_call_nobody() -> None:
    assert rewards(ValueError("never")).score([]) == {"r0": []}


def test_needs_have_a_default_and_a_type() -> None:
    class Needy(Answers):
        @hookimpl
        def reward_needs(self) -> Any:
            return self.answers

    assert rewards([1]).needs == {"r0": Needs()}
    needs = Needs(columns=("level",), reference=True)
    assert Rewards([bind("reward", Needy(needs), "n")]).needs == {"n": needs}
    with pytest.raises(PluginReturnError, match="not Needs"):
        Rewards([bind("reward", Needy(["level"]), "n")])


REWARD = """
from pydantic import BaseModel, ConfigDict
from posttune import hookimpl

class Plugin:
    class Config(BaseModel):
        model_config = ConfigDict(extra="forbid")
        score: float | str = 0.0

    def __init__(self, config):
        self.config = config

    @hookimpl
    def reward_score(self, samples):
        return [self.config.score for _ in samples]
"""


def test_one_plugin_under_two_labels(install: Install) -> None:
    install(plugin("constant", "reward", REWARD))
    refs = [
        PluginRef(name="constant", label="low", options={"score": 0.1}),
        PluginRef(name="constant", label="high", options={"score": 0.9}),
    ]
    assert build_rewards(refs).score(samples(1)) == {"low": [0.1], "high": [0.9]}
    bad = build_rewards([PluginRef(name="constant", label="text", options={"score": "one"})])
    with pytest.raises(PluginReturnError) as caught:
        bad.score(samples(1))
    who = "reward 'constant' [text] (posttune-constant 1.2.3): reward_score returned str 'one'"
    assert str(caught.value).startswith(who)


def test_members_are_never_pickled() -> None:
    with pytest.raises(TypeError, match="cannot be pickled: send its configuration"):
        pickle.dumps(bind("reward", Answers([1]), "r"))


class Combines(Answers):
    reward_score = None  # type: ignore[assignment]

    @hookimpl
    def reward_manager_combine(self, samples: Sequence[Sample], scores: Any) -> Any:
        return self.answers


def combine(answers: Any, tokens: int | None = None) -> list[Reward]:
    done = Completion("q", 0, (1,) * (tokens or 0), None, "stop", 0) if tokens is not None else None
    sample = Sample(id="s0", group=0, prompt="p", response="r", completion=done)
    manager = RewardManager(bind("reward_manager", Combines(answers), "m"))
    return manager.combine([sample], {"r": [1.0]})


def test_a_manager_s_rewards_pass() -> None:
    good = [Reward(1.5, per_token=(1.0, 0.5), dims={"a": 1})]
    assert combine(good, tokens=2) == good
    assert combine([Reward(None)]) == [Reward(None)]


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (None, "not a list of Reward"),
        ([], "0 rewards for 1 samples"),
        ([1.0], "float 1.0, not a Reward, for sample s0"),
        ([Reward(math.nan)], "the value float nan"),
        ([Reward(True)], "the value bool True"),
        ([Reward(1.0, dims={"a": math.inf})], "float inf as dimension 'a'"),
        ([Reward(1.0, per_token=(1.0, 0.5, 0.5))], "3 rewards per token for 2 tokens"),
        ([Reward(1.0, per_token=(1.0, 0.5))], "that sum to 1.5 with the value 1"),
        ([Reward(None, per_token=(1.0, 0.5))], "rewards per token without a value"),
        ([Reward(1.0, per_token=(math.nan, 0.5))], "that is no finite number"),
    ],
)
def test_a_manager_s_bad_rewards_are_refused(answers: Any, words: str) -> None:
    with pytest.raises(PluginReturnError) as caught:
        combine(answers, tokens=2)
    assert str(caught.value).startswith("reward_manager 'm': reward_manager_combine returned ")
    assert words in str(caught.value)


MANAGER = """
from posttune import hookimpl
from posttune.types import Reward

class Plugin:
    @hookimpl
    def reward_manager_combine(self, samples):
        return [Reward(1.0) for _ in samples]
"""
WRAPPER = """
from dataclasses import replace
from posttune import hookimpl

class Plugin:
    @hookimpl(wrapper=True)
    def reward_manager_combine(self):
        rewards = yield
        return [replace(each, value=each.value {change}) for each in rewards]
"""


def test_a_manager_can_be_wrapped_and_the_first_wrapper_is_outermost(install: Install) -> None:
    install(
        plugin("ones", "reward_manager", MANAGER),
        plugin("double", "reward_manager", WRAPPER.format(change="* 2")),
        plugin("plus", "reward_manager", WRAPPER.format(change="+ 3")),
    )
    ones, double, plus = (PluginRef(name=name) for name in ("ones", "double", "plus"))
    assert build_manager(ones, [double, plus]).combine(samples(1), {})[0].value == 8.0
    assert build_manager(ones, [plus, double]).combine(samples(1), {})[0].value == 5.0
    for ref, wrappers in ((double, []), (ones, [PluginRef(name="ones", label="again")])):
        with pytest.raises(PluginContractError, match="and should be by"):
            build_manager(ref, wrappers)
