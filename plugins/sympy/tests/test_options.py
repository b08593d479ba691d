"""What each option changes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from posttune.config.models import PluginRef
from posttune.errors import DataError
from posttune.facade import build_rewards
from posttune.types import Needs, Sample
from posttune_sympy import MathOptions, MathRewardFunction
from pydantic import ValidationError


def score(reference: object, response: str, **options: Any) -> float:
    return MathRewardFunction(**options).compute_reward(prompt="", response=response, reference=reference)


@pytest.mark.parametrize(
    ("response", "scores"),
    [
        (r"\boxed{5}", {"any": 1.0, "marked": 1.0, "boxed": 1.0}),
        ("The answer is 5.", {"any": 1.0, "marked": 1.0, "boxed": 0.0}),
        ("<answer>5</answer>", {"any": 1.0, "marked": 1.0, "boxed": 0.0}),
        ("#### 5", {"any": 1.0, "marked": 1.0, "boxed": 0.0}),
        ("so we get 5", {"any": 1.0, "marked": 0.0, "boxed": 0.0}),
    ],
)
def test_format(response: str, scores: dict[str, float]) -> None:
    assert {form: score("5", response, format=form) for form in scores} == scores


@pytest.mark.parametrize(
    ("response", "scores"),
    [
        ("B", {"any": 1.0, "marked": 0.0, "boxed": 0.0}),
        ("The answer is B", {"any": 1.0, "marked": 1.0, "boxed": 0.0}),
        (r"\boxed{\text{(B)}}", {"any": 1.0, "marked": 1.0, "boxed": 1.0}),
    ],
)
def test_format_of_choices(response: str, scores: dict[str, float]) -> None:
    assert {form: score("B", response, format=form) for form in scores} == scores


def test_boxes() -> None:
    two = r"\boxed{1} and \boxed{2}"
    assert [score("1, 2", two, boxes=boxes) for boxes in ("auto", "all", "last")] == [1.0, 1.0, 0.0]
    assert [score("2", two, boxes=boxes) for boxes in ("auto", "all", "last")] == [1.0, 0.0, 1.0]


def test_percent() -> None:
    for rule, scores in {"either": [1.0, 1.0], "fraction": [1.0, 0.0], "number": [0.0, 1.0]}.items():
        assert [score(value, r"50\%", percent=rule) for value in ("0.5", "50")] == scores
        assert score(r"50\%", r"\boxed{50\%}", percent=rule) == 1.0


def test_units() -> None:
    assert score(r"5\text{ cm}", r"\boxed{5\text{ kg}}") == 1.0
    assert score(r"5\text{ cm}", r"\boxed{5\text{ kg}}", units="match") == 0.0
    for rule in ("ignore", "match"):  # two units of one kind are converted
        assert score(r"5\text{ cm}", r"\boxed{5\text{ m}}", units=rule) == 0.0
        assert score(r"5\text{ cm}", r"\boxed{50\text{ mm}}", units=rule) == 1.0
    assert score(r"5\text{ cm}", r"\boxed{5\text{ cm}}", units="match") == 1.0
    assert score("5", r"\boxed{5\text{ cm}}", units="match") == 1.0


def test_rounding_digits() -> None:
    assert [score("1/3", text) for text in ("0.3333", "0.333")] == [1.0, 0.0]
    assert score("1/3", "0.33", rounding_digits=2) == 1.0
    assert score("1/3", "0.33333333", rounding_digits=0) == 0.0


def test_tolerance() -> None:
    assert score("100", "101") == 0.0
    assert score("100", "101", tolerance=0.02) == 1.0
    assert score(r"40\pi", "125", tolerance=0.01) == 1.0


@pytest.mark.parametrize(
    "options", [{"time_limit": 0}, {"percent": "maybe"}, {"tolerence": 0.1}, {"tolerance": float("nan")}]
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MathOptions.model_validate(options)


@pytest.mark.parametrize("reference", [None, [], [None]])
def test_a_missing_reference_is_an_error(reference: object) -> None:
    with pytest.raises(DataError, match="sympy_math"):
        score(reference, r"\boxed{5}")


@pytest.mark.parametrize(("reference", "expected"), [(5, 1.0), (5.0, 1.0), (["6", "5"], 1.0), (["6"], 0.0)])
def test_references_of_other_types(reference: object, expected: float) -> None:
    assert score(reference, r"\boxed{5}") == expected


def test_an_empty_reference_equals_nothing() -> None:
    assert [score("", text) for text in (r"\boxed{42}", "", " ")] == [0.0, 0.0, 0.0]


def test_as_a_plugin() -> None:
    rewards = build_rewards([PluginRef(name="sympy_math", options={"percent": "fraction"})])
    assert rewards.needs == {"sympy_math": Needs(reference=True)}
    samples = [
        Sample(id=str(index), group=0, prompt="", response=response, reference="0.5")
        for index, response in enumerate([r"\boxed{\frac12}", r"\boxed{2}", ""])
    ]
    assert rewards.score(samples) == {"sympy_math": [1.0, 0.0, 0.0]}


def test_both_sides_are_whole_solutions() -> None:
    solution = "6 * 7 = <<6*7=42>>42 eggs\n#### 42"
    assert score(solution, solution) == 1.0
    assert score(solution, "I counted 41.\n#### 41") == 0.0
