"""The script that holds functions and modules to their limits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def limits(folder: Path) -> tuple[int, str]:
    """Exit code and output of the script."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/limits.py"), str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def function(name: str, lines: int) -> str:
    """A function of that many lines."""
    return f"def {name}():\n" + "    pass\n" * (lines - 1)


def test_the_longest_allowed_passes(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(function("fine", 59) + "\n" * 341, encoding="utf-8")
    code, output = limits(tmp_path)
    assert code == 0
    assert "1 modules, longest 400 lines; 1 functions" in output


def test_a_line_too_many_is_named(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(function("long", 60), encoding="utf-8")
    (tmp_path / "large.py").write_text("x = 1\n" * 401, encoding="utf-8")
    code, output = limits(tmp_path)
    assert code == 1
    assert "long.py:1: long has 60 lines" in output
    assert "large.py: 401 lines" in output


def test_nothing_to_measure_is_a_failure(tmp_path: Path) -> None:
    assert limits(tmp_path)[0] == 2
