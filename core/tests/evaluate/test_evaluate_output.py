"""Where an evaluation is written: it replaces an earlier one, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from posttune.errors import UserError
from posttune.evaluate.stage import FILES, check_output


def test_a_new_an_empty_and_an_earlier_one_will_do(tmp_path: Path) -> None:
    check_output(tmp_path / "new")
    check_output(tmp_path)
    for name in FILES:
        (tmp_path / name).write_text("{}")
    check_output(tmp_path)


def test_what_is_not_ours_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text("{}")
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"something else than an evaluation: thesis\.txt"):
        check_output(tmp_path)
    with pytest.raises(UserError, match="is a file"):
        check_output(tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
