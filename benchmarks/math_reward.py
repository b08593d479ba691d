"""The reward sympy_math on labelled completions: agreement and speed, beside math-verify where it is given.

Usage: python benchmarks/math_reward.py [--data FOLDER] [--limit N] [--peer FOLDER]

FOLDER of --data holds labelled_completions.jsonl and answer_cases.jsonl. The peer is not installed beside
posttune: `pip install --target FOLDER --no-deps math-verify==0.9.0 latex2sympy2_extended==1.11.0
antlr4-python3-runtime==4.13.2`. Both judge every row in turn, in one process and one thread, so that
they share whatever else the machine does.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttune_sympy import MathRewardFunction

Judge = Callable[[str, str], bool]
ROOT = Path(__file__).parents[1]


@dataclass
class Tally:
    """What one judge did."""

    judge: Judge
    wall: list[float] = field(default_factory=list)
    cpu: float = 0.0
    right: int = 0
    false_positives: int = 0

    def rule(self, reference: str, response: str, label: bool) -> None:
        """Judge one row and measure it."""
        wall, cpu = time.perf_counter(), time.process_time()
        verdict = self.judge(reference, response)
        self.wall.append(time.perf_counter() - wall)
        self.cpu += time.process_time() - cpu
        self.right += verdict == label
        self.false_positives += verdict and not label

    def __str__(self) -> str:
        rows = len(self.wall)
        ordered = sorted(1e3 * seconds for seconds in self.wall)
        return (
            f"agreement {self.right / rows:.4f}  false positives {self.false_positives}  "
            f"{1e3 * rows / sum(ordered):.0f}/s wall  {rows / self.cpu:.0f}/s of one core  "
            f"median {statistics.median(ordered):.2f} ms  p95 {ordered[int(0.95 * rows)]:.2f} ms  "
            f"max {ordered[-1]:.0f} ms"
        )


def ours() -> Judge:
    """sympy_math with default options; SymPy's import is done before the clock starts."""
    reward = MathRewardFunction()
    reward.compute_reward(prompt="", response=r"\boxed{\sin\frac{\pi}{5}}", reference=r"\cos\frac{3\pi}{10}")
    return lambda reference, response: (
        reward.compute_reward(prompt="", response=response, reference=reference) == 1.0
    )


def peer(folder: Path) -> Judge:
    """math-verify as its documentation shows it, with bare references in a box."""
    sys.path.append(str(folder))
    library: Any = importlib.import_module("math_verify")

    def judge(reference: str, response: str) -> bool:
        marked = any(mark in reference for mark in ("$", "\\boxed", "\\(", "\\["))
        gold = library.parse(reference if marked else rf"\boxed{{{reference}}}")
        return bool(library.verify(gold, library.parse(response)))

    judge("1", r"\boxed{\frac{2}{2}}")
    return judge


def completions(folder: Path) -> Iterable[tuple[str, str, bool]]:
    """Reference, response and label of every completion."""
    with (folder / "labelled_completions.jsonl").open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            yield row["gold"], row["completion"], bool(row["label"])


def cases(folder: Path) -> Iterable[tuple[str, str, bool]]:
    """Reference, response and label of every undisputed case; bare answers in a box for the peer's sake."""
    with (folder / "answer_cases.jsonl").open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            if row["expected"] == "disputed" or row["pathological"]:
                continue
            gold, answer = (_text(row, side) for side in ("gold", "pred"))
            yield (
                gold,
                rf"\boxed{{{answer}}}" if row["pred_form"] == "bare" else answer,
                bool(row["expected"]),
            )


def _text(row: dict[str, Any], side: str) -> str:
    parts = row.get(f"{side}_parts")
    return "".join(part * times for part, times in parts) if parts else row[side]


def main() -> None:
    """Print one line a judge and data set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "math")
    parser.add_argument("--limit", type=int, default=None, help="rows of each set")
    parser.add_argument("--peer", type=Path, default=None, help="folder that holds math-verify")
    arguments = parser.parse_args()
    judges = {"sympy_math": ours()} | ({"math-verify": peer(arguments.peer)} if arguments.peer else {})
    for name, source in (("labelled completions", completions), ("answer cases", cases)):
        rows = list(source(arguments.data))[: arguments.limit]
        tallies = {label: Tally(judge) for label, judge in judges.items()}
        for row in rows:
            for tally in tallies.values():
                tally.rule(*row)
        for label, tally in tallies.items():
            print(f"{name}, {len(rows)} rows, {label}: {tally}")


if __name__ == "__main__":
    main()
