"""Managers: gated, overlong, per_dimension, and a class of the user's."""

from __future__ import annotations

import pytest
from posttune.config.models import PluginRef
from posttune.errors import DataError, PluginOptionsError, PluginReturnError, UserError
from posttune.facade import build_manager
from posttune.types import Completion, Reward, Sample


def combine(name: str, scores: dict, lengths: list[int] | None = None, **options) -> list[Reward]:
    size = len(next(iter(scores.values())))
    completions = [
        Completion("q", i, (1,) * length, None, "stop", 0) for i, length in enumerate(lengths or [])
    ] or [None] * size
    samples = [Sample(str(i), 0, "", "", completion=completions[i]) for i in range(size)]
    return build_manager(PluginRef(name=name, options=options)).combine(samples, scores)


def test_the_gate_opens_the_others_from_its_threshold_on():
    scores = {"right": [0.0, 0.4, 0.5, 1.0, None], "brief": [1.0, 1.0, 1.0, None, 1.0]}
    got = combine("gated", scores, gate="right", threshold=0.5, weights={"right": 2.0, "brief": 0.1})
    assert [reward.value for reward in got] == [0.0, 0.8, 1.1, None, None]
    assert got[0].dims == {"right": 0.0, "brief": 1.0}


def test_behind_a_closed_gate_nothing_else_matters():
    assert combine("gated", {"right": [0.0], "brief": [None]}, gate="right")[0].value == 0.0


def test_a_gate_that_is_no_reward_is_refused():
    with pytest.raises(UserError, match=r"options.gate names 'rigth'.*did you mean 'right'"):
        combine("gated", {"right": [0.0]}, gate="rigth")


@pytest.mark.parametrize(
    ("length", "punishment"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0), (5000, -1.0)],
)
def test_overlong_is_equation_13(length, punishment):
    (got,) = combine("overlong", {"right": [1.0]}, [length], max_length=100, buffer=20)
    assert got.value == pytest.approx(1.0 + punishment)
    assert got.dims == {"right": 1.0, "overlong": pytest.approx(punishment)}
    (half,) = combine("overlong", {"right": [1.0]}, [length], max_length=100, buffer=20, penalty=0.5)
    assert half.value == pytest.approx(1.0 + punishment / 2)


def test_overlong_needs_tokens_and_leaves_the_unscorable():
    assert combine("overlong", {"right": [None]}, max_length=9, buffer=3)[0].value is None
    with pytest.raises(DataError, match="tokens of sample 0 are not known"):
        combine("overlong", {"right": [1.0]}, max_length=9, buffer=3)
    with pytest.raises(PluginOptionsError, match="buffer 10 is longer than max_length 9"):
        combine("overlong", {"right": [1.0]}, max_length=9, buffer=10)


def test_per_dimension_keeps_what_could_be_scored():
    got = combine("per_dimension", {"a": [1.0, None, None], "f": [{"x": 0.5, "y": 2.0}, {"x": 1.0}, None]})
    assert [reward.value for reward in got] == [3.5, 1.0, None]
    assert [dict(reward.dims) for reward in got] == [{"a": 1.0, "f/x": 0.5, "f/y": 2.0}, {"f/x": 1.0}, {}]


CODE = """
from posttune.types import Reward

class Best:
    def __init__(self, scale=1.0):
        self.scale = scale
    def combine(self, samples, scores):
        columns = list(scores.values())
        return [max((c[i] for c in columns if c[i] is not None), default=None) for i in range(len(samples))]

class Tokens:
    def combine(self, samples, scores):
        return [Reward(2.0, (1.0, 1.0))]

def plain(samples, scores):
    return [0.5 for _ in samples]

def short(samples, scores):
    return []

def odd(samples, scores):
    return ["much" for _ in samples]

number = 3
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "m.py"
    file.write_text(CODE)
    return str(file)


def test_a_class_of_ones_own_is_a_manager(path):
    got = combine("function", {"a": [1.0, None], "b": [2.0, None]}, path=f"{path}:Best")
    assert [reward.value for reward in got] == [2.0, None]
    assert got[0].dims == {"a": 1.0, "b": 2.0}
    assert combine("function", {"a": [1.0]}, path=f"{path}:Best", options={"scale": 2.0})[0].value == 1.0
    assert combine("function", {"a": [1.0]}, [2], path=f"{path}:Tokens")[0].per_token == (1.0, 1.0)
    assert combine("function", {"a": [1.0]}, path=f"{path}:plain")[0].value == 0.5


@pytest.mark.parametrize(("name", "options", "error", "words"), [
    ("Bets", {}, UserError, "did you mean 'Best'"),
    ("number", {}, UserError, "it is a int without combine"),
    ("Best", {"scal": 1}, UserError, "it cannot be created"),
    ("plain", {"scale": 1}, UserError, "options are for a class"),
    ("short", {}, PluginReturnError, "0 rewards for 1 samples"),
    ("odd", {}, PluginReturnError, "str 'much', not a Reward"),
])  # fmt: skip
def test_what_is_no_manager_is_refused(path, name, options, error, words):
    with pytest.raises(error, match=words):
        combine("function", {"a": [1.0]}, path=f"{path}:{name}", options=options)
