"""The reward author's page counts the lines of its steps right."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "write_a_reward.md"
FILES = {
    "a function": ("polite.py", None),
    "dimensions": ("manners.py", None),
    "a class": ("word.py", None),
    "a package": ("posttune-word/posttune_word/__init__.py", "posttune-word/pyproject.toml"),
}


def lines(text: str, name: str | None) -> int:
    """Lines of a file of the page, blank ones and docstrings aside; 0 for no file."""
    if name is None:
        return 0
    match = re.search(rf"<!-- block: file {re.escape(name)} -->\n```\w*\n(.*?)^```$", text, re.M | re.S)
    assert match, name
    return sum(bool(line.strip()) and not line.strip().startswith('"""') for line in match[1].splitlines())


def test_the_table_counts_right() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for step, (code, metadata) in FILES.items():
        row = re.search(rf"^\| {step} \| [^|]* \| (\d+) \| (\d+) \|$", text, re.M)
        assert row, step
        assert (int(row[1]), int(row[2])) == (lines(text, code), lines(text, metadata)), step
    assert lines(text, FILES["a package"][0]) < 20
