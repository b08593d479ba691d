"""The table of accepted forms is the one in the README; every row of it holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from posttune_sympy import MathOptions, MathRewardFunction

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def table(heading: str) -> Iterator[list[str]]:
    """The rows of the table under a heading; code spans lose their marks."""
    section = README.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    for line in lines[2:]:
        cells = re.split(r"(?<!\\)\|", line)[1:-1]
        yield [_text(cell) for cell in cells]


def _text(cell: str) -> str:
    cell = cell.strip()
    if cell.startswith("`") and cell.endswith("`"):
        cell = cell[1:-1].strip()
    return cell.replace(r"\|", "|").replace("⏎", "\n")


PLACES = list(table("Where the answer stands"))
SAME = list(table("What is the same"))
DIFFERENT = list(table("What is not"))
reward = MathRewardFunction()


def score(reference: str, response: str) -> float:
    return reward.compute_reward(prompt="", response=response, reference=reference)


def test_the_tables_are_there() -> None:
    assert len(PLACES) > 10
    assert len(SAME) > 40
    assert len(DIFFERENT) > 8


@pytest.mark.parametrize(("row", "mark", "response", "answer"), PLACES)
def test_where_an_answer_stands(row: str, mark: str, response: str, answer: str) -> None:
    assert score(answer, response) == 1.0
    # The same table extracts the reference, only that all its boxes count.
    if not mark.startswith("box; of a response"):
        assert score(response, rf"\boxed{{{answer}}}") == 1.0


@pytest.mark.parametrize(("form", "reference", "response"), SAME)
def test_what_is_the_same(form: str, reference: str, response: str) -> None:
    assert score(reference, response) == 1.0
    assert score(reference, rf"so we find \boxed{{{response}}} in the end.") == 1.0
    assert score(response, rf"\boxed{{{reference}}}") == 1.0


@pytest.mark.parametrize(("form", "reference", "response"), DIFFERENT)
def test_what_is_not(form: str, reference: str, response: str) -> None:
    assert score(reference, response) == 0.0


def test_every_option_is_in_the_table_with_its_default() -> None:
    rows = {name: default for name, default, _ in table("Options")}
    fields = MathOptions.model_fields
    assert rows == {name: str(field.default) for name, field in fields.items()}
    assert all(field.description for field in fields.values())
