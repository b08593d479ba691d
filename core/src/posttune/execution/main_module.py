"""What lives in the user's ``__main__``, which no worker process imports."""

from __future__ import annotations

import sys
from pathlib import Path

from posttune.config.base import RewardRef
from posttune.errors import UserError

FIX = "move the function to a file or module of its own, or set executor: thread"


def main_file() -> str | None:
    """The script that is running; None in a notebook, in ``python -`` and at a prompt."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return str(Path(path).resolve()) if path and Path(path).is_file() else None


def refuse_main(ref: RewardRef) -> None:
    """Raise UserError where a worker process could not load this reward: from ``__main__``, or a closure."""
    target = ref.options.get("path")
    place, _, name = target.rpartition(":") if isinstance(target, str) else ("", "", "")
    running = main_file()
    who = f"reward {ref.tag!r}"
    if place == "__main__" or (place and running and str(Path(place).resolve()) == running):
        what = f"{name!r} is defined in the script that is running, which no worker process may run again"
        raise UserError(what, who=who, fix=FIX)
    if "<" in name:
        raise UserError(f"{name!r} is made as the script runs: no other process has it", who=who, fix=FIX)
