"""A thousand pairs of answers, written for this reward and judged by hand, bare and in a box."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from posttune_sympy import MathRewardFunction

PAIRS = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "answer_pairs.jsonl").read_text("utf-8").splitlines()
]
SENTENCE = ("boxed", "fbox", "answer is", "Answer", "option is")
CATEGORIES = sorted({pair["category"] for pair in PAIRS})


def responses(pair: dict[str, Any]) -> Iterator[str]:
    """The answer alone; and in a box, unless it is a sentence or holds a box or a formula."""
    yield pair["pred"]
    text = pair["pred"].replace(r"\$", "")
    if "form" not in pair and "$" not in text and not any(mark in text for mark in SENTENCE):
        yield rf"So the result is $\boxed{{{pair['pred']}}}$."


@pytest.mark.parametrize("category", CATEGORIES)
def test_pairs(category: str) -> None:
    reward = MathRewardFunction()
    wrong = [
        (pair["gold"], response)
        for pair in PAIRS
        if pair["category"] == category
        for response in responses(pair)
        if reward.compute_reward(prompt="", response=response, reference=pair["gold"]) != float(pair["same"])
    ]
    assert wrong == []
    assert not reward.counts


def test_there_are_enough_of_both_kinds() -> None:
    assert len(PAIRS) > 900
    assert sum(not pair["same"] for pair in PAIRS) > 150
