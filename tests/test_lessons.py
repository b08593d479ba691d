"""Pages that name tests: every lesson has its line, and every test that is named exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "lessons.md"
LESSONS = 115
_ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|$", re.M)
_TEST = re.compile(r"`(\w+\.py)::(\w+)`")


def sources() -> Iterator[Path]:
    """Tests, and the checks of the conformance kit."""
    for folder in ("core/tests", "tests", "plugins", "core/src/posttune/testing"):
        for path in (ROOT / folder).rglob("*.py"):
            if not any(part.startswith(".") for part in path.relative_to(ROOT).parts):
                yield path


def known_tests() -> dict[str, set[str]]:
    """The names of test functions and methods, by the name of their file."""
    found: dict[str, set[str]] = {}
    for path in sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
        found.setdefault(path.name, set()).update(
            node.name for node in functions if node.name.startswith("test_")
        )
    return found


def problems(text: str, known: dict[str, set[str]]) -> list[str]:
    """What is wrong with the table."""
    rows = _ROW.findall(text)
    numbers = [int(number) for number, _, _ in rows]
    found = [f"lesson {number} has no line" for number in range(1, LESSONS + 1) if number not in numbers]
    found += [f"lesson {number} has two lines" for number in set(numbers) if numbers.count(number) > 1]
    for number, _, where in rows:
        named = _TEST.findall(where)
        if not named:
            found.append(f"lesson {number} names no test")
        found += [
            f"lesson {number}: there is no {file}::{test}"
            for file, test in named
            if test not in known.get(file, set())
        ]
    return found


def test_every_lesson_has_a_test_that_exists() -> None:
    assert problems(PAGE.read_text(encoding="utf-8"), known_tests()) == []


@pytest.mark.parametrize("page", ["checkpoints.md", "export.md"])
def test_tests_that_other_pages_name_exist(page: str) -> None:
    named, known = _TEST.findall((PAGE.parent / page).read_text(encoding="utf-8")), known_tests()
    assert len(named) > 10
    assert [each for each in named if each[1] not in known.get(each[0], set())] == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ((r"^\| 77 .*\n", ""), "lesson 77 has no line"),
        ((r"`test_kill.py::\w+`", "`test_kill.py::test_nothing`"), "there is no test_kill.py::test_nothing"),
        ((r"^(\| 24 \| [^|]+ \|).*$", r"\1 later |"), "lesson 24 names no test"),
        ((r"^\| 3 \|", "| 2 |"), "lesson 2 has two lines"),
    ],
)
def test_the_check_sees_what_is_missing(change: tuple[str, str], problem: str) -> None:
    text = re.sub(*change, PAGE.read_text(encoding="utf-8"), flags=re.M)
    assert any(problem in each for each in problems(text, known_tests()))
