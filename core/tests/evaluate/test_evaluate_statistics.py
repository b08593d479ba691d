"""Intervals, pass@k and the summary of answers, against values worked out by hand."""

from __future__ import annotations

import json
from itertools import combinations

import pytest
from posttune.evaluate.report import Answer, summarise
from posttune.evaluate.statistics import halvings, mean, pass_at_k, wilson


@pytest.mark.parametrize(("rate", "n", "expected"), [
    (0.5, 100, (0.4038315, 0.5961685)),
    (0.0, 10, (0.0, 0.2775328)),
    (1.0, 10, (0.7224672, 1.0)),
    (81 / 263, 263, (0.2553, 0.3662)),  # Newcombe 1998, table I
    (1.0, 1, (0.2065493, 1.0)),
])  # fmt: skip
def test_wilson(rate, n, expected):
    low, high = wilson(rate, n)
    assert (low, high) == pytest.approx(expected, abs=5e-5)
    z = 1.959963984540054
    for bound in (low, high):  # the bounds solve the score equation
        if 0 < bound < 1:
            assert abs(rate - bound) == pytest.approx(z * (bound * (1 - bound) / n) ** 0.5, abs=1e-7)


def test_an_interval_of_nothing():
    with pytest.raises(ValueError, match="at least one"):
        wilson(0.5, 0)


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_answer(n):
    for correct in range(n + 1):
        answers = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            draws = list(combinations(answers, k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("n", "correct", "k"), [(3, 4, 1), (3, 1, 0), (3, 1, 4), (3, -1, 1)])
def test_pass_at_k_outside_its_domain(n, correct, k):
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(n, correct, k)


def test_small_helpers():
    assert mean([]) is None
    assert mean([1, 2]) == 1.5
    assert [halvings(n) for n in (1, 2, 3, 4, 6, 8)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 6],
        [1, 2, 4, 8],
    ]


def answers(scores: list[list[float | None]], by: list[str] | None = None) -> list[Answer]:
    return [
        Answer(prompt, {"right": score, "other": 0.25}, 4, score == 0.0, {"level": by[prompt]} if by else {})
        for prompt, each in enumerate(scores)
        for score in each
    ]


def test_the_summary():
    got = summarise(answers([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.4, 0.6]]), k=2, seconds=4.0, samples=[])
    assert got.accuracy == pytest.approx((0.5 + 1 + 0 + 0.5) / 4)
    assert got.ci95 == pytest.approx(wilson(0.5, 4))
    assert (got.n, got.k, got.unscorable) == (4, 2, 0)
    assert got.mean_at_k == pytest.approx((0.5 + 1 + 0 + 0.5) / 4)
    assert got.pass_at_k == pytest.approx({1: 0.5, 2: 0.75})
    assert got.rewards == {"right": pytest.approx(0.5), "other": 0.25}
    assert (got.tokens_per_s, got.tokens_per_completion, got.truncated_fraction) == (8.0, 4.0, 3 / 8)
    assert got.metrics() == pytest.approx({
        "val/accuracy": 0.5, "val/pass@2": 0.75, "val/truncated_fraction": 0.375,
        "val/reward/other/mean": 0.25,
    })  # fmt: skip


def test_the_document():
    got = summarise(answers([[1.0, 0.0]] * 3, ["10", "9", "x"]), k=2, seconds=1.0, samples=[]).as_json()
    assert json.loads(json.dumps(got)) == got
    assert {"accuracy", "ci95", "n", "mean@k", "pass@k", "tokens_per_s", "by"} <= got.keys()
    assert (got["pass@1"], got["pass@2"], got["pass@k"]) == (0.5, 1.0, 1.0)
    assert list(got["by"]["level"]) == ["9", "10", "x"]
    assert got["by"]["level"]["9"].keys() == {"accuracy", "ci95", "n"}
    assert len(got["ci95"]) == 2


def test_unscorable_answers_are_left_out_and_counted():
    got = summarise(answers([[1.0, None], [None, None], [0.0, 0.0]]), k=2, seconds=1.0, samples=[])
    assert (got.accuracy, got.n, got.unscorable) == (0.5, 2, 3)
    assert got.pass_at_k == {1: 0.5, 2: 0.0}
    nothing = summarise(answers([[None]]), k=1, seconds=1.0, samples=[])
    assert (nothing.accuracy, nothing.ci95, nothing.n, nothing.mean_at_k) == (None, None, 0, None)
    assert "val/accuracy" not in nothing.metrics()
    assert nothing.as_json()["pass@k"] is None


def test_no_answers():
    with pytest.raises(ValueError, match="no answers"):
        summarise([], k=1, seconds=1.0, samples=[])
