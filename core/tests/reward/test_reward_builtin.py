"""`format`, `length`, `weighted_sum`, and the base class: every option does what it says."""

from __future__ import annotations

import subprocess
import sys

import pytest
from posttune.config.models import PluginRef, Strict
from posttune.errors import DataError, PluginOptionsError, UserError
from posttune.facade import build_manager, build_rewards
from posttune.reward.base import BaseRewardFunction
from posttune.reward.format import FormatReward
from posttune.types import Completion, Needs, Reward, Sample


def score(name: str, response: str, tokens: int | None = None, **options: object):
    completion = Completion("r", 0, (1,) * tokens, None, "stop", 0) if tokens is not None else None
    sample = Sample("s", 0, "p", response, completion=completion)
    return build_rewards([PluginRef(name=name, options=options)]).score([sample])[name][0]


THINK = "<think>hm\nhm</think>\n<answer>4</answer>"


@pytest.mark.parametrize(("response", "options", "expected"), [
    (THINK, {"tags": ["think", "answer"]}, 1),
    (f"  {THINK}\n", {"tags": ["think", "answer"]}, 1),
    (THINK, {"tags": ["answer", "think"]}, 0),
    (f"so: {THINK}", {"tags": ["think", "answer"]}, 0),
    (f"so: {THINK}.", {"tags": ["think", "answer"], "match": "partial"}, 1),
    (THINK + "<think></think>", {"tags": ["think", "answer"], "match": "partial"}, 0),
    ("<think>x", {"tags": ["think"]}, 0),
    ("</think>x<think>", {"tags": ["think"], "match": "partial"}, 0),
    ("<a><b></a></b>", {"tags": ["a", "b"]}, 0),
    ("", {"tags": ["a"]}, 0),
    (THINK, {"pattern": r"<think>.*</think>\s*<answer>.*</answer>"}, 1),
    (f"{THINK} and more", {"pattern": r"<think>.*</think>\s*<answer>.*</answer>"}, 0),
    (f"{THINK} and more", {"pattern": r"<answer>\d</answer>", "match": "partial"}, 1),
    ("\n4 \n", {"pattern": r"\d"}, 1),
    ("44", {"pattern": r"\d"}, 0),
    ("", {"pattern": r""}, 1),
])  # fmt: skip
def test_format(response, options, expected):
    assert score("format", response, **options) == expected


def test_a_pattern_that_explodes_is_cut_off_and_said(caplog):
    assert score("format", "a" * 4000 + "b", pattern=r"(a|aa)+c", timeout_s=0.05) is None
    assert "unscorable" in caplog.text


@pytest.mark.parametrize(("options", "message"), [
    ({}, "give either pattern or tags"),
    ({"pattern": "a", "tags": ["b"]}, "give either pattern or tags"),
    ({"pattern": "(a"}, "no regular expression"),
    ({"tags": ["<a>"]}, "write think, not <think>"),
    ({"tags": ["a", "a"]}, "named twice"),
    ({"tags": []}, "tags"),
    ({"tags": ["a"], "match": "whole"}, "match"),
    ({"tags": ["a"], "timeout_s": 0.0}, "timeout_s"),
])  # fmt: skip
def test_format_options(options, message):
    with pytest.raises(PluginOptionsError, match=message):
        score("format", "", **options)


@pytest.mark.parametrize(("tokens", "options", "expected"), [
    (10, {"target": 10}, 1.0),
    (5, {"target": 10}, 0.5),
    (15, {"target": 10}, 0.5),
    (25, {"target": 10}, 0.0),
    (12, {"target": 10, "tolerance": 4}, 0.5),
    (0, {"limit": 8}, 1.0),
    (8, {"limit": 8}, 1.0),
    (10, {"limit": 8}, 0.75),
    (10, {"limit": 8, "tolerance": 4}, 0.5),
    (99, {"limit": 8}, 0.0),
])  # fmt: skip
def test_length(tokens, options, expected):
    assert score("length", "not counted", tokens, **options) == expected
    assert score("length", "x" * tokens, unit="characters", **options) == expected


def test_length_needs_tokens_to_count_them():
    with pytest.raises(DataError, match="the tokens of sample s are not known"):
        score("length", "text", target=3)


@pytest.mark.parametrize(
    "options", [{}, {"target": 1, "limit": 2}, {"target": 0}, {"target": 1, "unit": "words"}]
)
def test_length_options(options):
    with pytest.raises(PluginOptionsError):
        score("length", "", **options)


def combine(scores: dict, weights: dict | None = None) -> list[Reward]:
    manager = build_manager(PluginRef(name="weighted_sum", options={"weights": weights} if weights else {}))
    size = len(next(iter(scores.values())))
    return manager.combine([Sample(str(i), 0, "", "") for i in range(size)], scores)


def test_weighted_sum():
    got = combine({"right": [1.0, 0.0], "brief": [0.5, 1.0]}, {"brief": 0.2})
    assert [reward.value for reward in got] == pytest.approx([1.1, 0.2])
    assert got[0].dims == {"right": 1.0, "brief": 0.5}


def test_one_unscorable_score_masks_the_sample_and_no_other():
    got = combine({"right": [1.0, None, 0.0], "brief": [None, 0.5, 1.0]})
    assert [reward.value for reward in got] == [None, None, 1.0]
    assert got[1].dims == {"brief": 0.5}


def test_a_weight_of_zero_still_masks():
    assert combine({"a": [1.0], "b": [None]}, {"b": 0.0})[0].value is None


def test_dimensions_add_up_unless_there_is_a_total():
    got = combine({"f": [{"a": 1.0, "b": 0.5}, {"a": 1.0, "b": 0.5, "total": 9.0}]}, {"f": 2.0})
    assert [reward.value for reward in got] == [3.0, 18.0]
    assert got[0].dims == got[1].dims == {"f/a": 1.0, "f/b": 0.5}


def test_an_unknown_label_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"'brif', and no reward has that label \(did you mean 'brief'\?\)"):
        combine({"right": [1.0], "brief": [0.5]}, {"brif": 1.0})


class Shouting(BaseRewardFunction):
    """The least that a reward author writes."""

    def compute_reward(
        self, prompt: str, response: str, reference: str | None = None, **columns: object
    ) -> float:
        return float(response.isupper())


class Configured(BaseRewardFunction):
    """With options, a column and no reference."""

    class Config(Strict):
        bonus: float = 1.0

    async def compute_reward(self, response: str, level: int) -> float:
        return self.config.bonus * level


def test_a_subclass_is_a_reward_as_it_stands():
    samples = [
        Sample("a", 0, "", "YES", columns={"level": 2}),
        Sample("b", 0, "", "no", columns={"level": 3}),
    ]
    assert Shouting().compute_reward(prompt="", response="YES") == 1.0
    assert list(Shouting().reward_score(samples)) == [1.0, 0.0]
    assert Shouting().reward_needs() == Needs(each=True)
    assert Configured(bonus=2.0).reward_needs() == Needs(
        columns=("level",), each=True, reads=("level",), asynchronous=True
    )
    with pytest.raises(ValueError, match="bonsu"):
        Configured(bonsu=1.0)
    with pytest.raises(TypeError, match="abstract"):
        BaseRewardFunction()


def test_a_subclass_works_from_its_class_by_path(tmp_path):
    code = (
        "from posttune import BaseRewardFunction\nclass R(BaseRewardFunction):\n"
        "    def compute_reward(self, prompt, response): return 2"
    )
    (tmp_path / "r.py").write_text(code)
    options = {"path": f"{tmp_path}/r.py:R"}
    assert build_rewards([PluginRef(name="function", options=options)]).score([Sample("s", 0, "", "")]) == {
        "function": [2.0]
    }


def test_rewards_bring_no_torch():
    code = (
        "import sys; from posttune import BaseRewardFunction; import posttune.reward.function;"
        "import posttune.reward.gsm8k, posttune.reward.format, posttune.reward.length;"
        "import posttune.reward.managers, posttune.rollout.hf, posttune.evaluate.statistics;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_format_by_hand():
    assert FormatReward(tags=["a"]).compute_reward(prompt="", response="<a></a>") == 1.0
