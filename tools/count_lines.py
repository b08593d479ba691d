"""Files and lines that an author writes for each kind of plugin, beside the peers' figures.

Usage: python tools/count_lines.py [DOCUMENT]

Prints the table; with a DOCUMENT rewrites what stands between <!-- count --> and <!-- /count -->.

Counted is the least that is listed, passes the contract and runs: the examples below, each of which a test
runs. A line is one that is neither blank, a comment nor a docstring. A package's metadata (12 lines, the
same for every kind) counts apart: only who gives a plugin to others needs it.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples/least"
REGION = re.compile(r"(?<=<!-- count -->\n).*?(?=<!-- /count -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """A kind, our least example, what the peers ask for, and why ours is longer where it is."""

    kind: str
    example: str
    peers: str
    cheapest: (
        int | None
    )  # lines of the cheapest peer that has a place for this kind; None: a fork or a script
    why: str = ""


ROWS = (
    Row("reward, own project", "reward.py", "TRL: 3 lines in 1 file; verl: 3 to 4 and two overrides", 3),
    Row("reward, to give to others", "reward_plugin.py", "the seeds' BERTScore class: 52 lines", 52),
    Row("reward manager", "reward_manager.py", "not counted", None),
    Row(
        "advantage estimator",
        "advantage_estimator.py",
        "verl: 10 lines and an environment variable",
        10,
    ),
    Row("policy loss", "policy_loss.py", "not counted", None),
    Row("rollout backend", "rollout_backend.py", "verl: at least 3 files and a private dict", None),
    Row("data converter", "data_converter.py", "a script", None),
    Row("checkpoint exporter", "checkpoint_exporter.py", "a fork or a script", None),
    Row("observer", "observer.py", "a fork", None),
)


def lines_of(path: Path) -> int:
    """Lines of code: no blank ones, comments or docstrings."""
    source = path.read_text(encoding="utf-8")
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and body:
            first = body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(body) > 1:
                skipped |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in skipped
        for number, line in enumerate(source.splitlines(), start=1)
    )


def table() -> str:
    """The table in Markdown."""
    text = "| what | files | lines | peers | longer, since |\n|---|---|---|---|---|\n"
    for row in ROWS:
        text += f"| {row.kind} | 1 | {lines_of(EXAMPLES / row.example)} | {row.peers} | {row.why} |\n"
    return text


def main(arguments: list[str]) -> int:
    """Print the table, or put it into a document; 1 if that has no place for it."""
    if not arguments:
        print(table(), end="")
        return 0
    document = Path(arguments[0])
    text = document.read_text(encoding="utf-8")
    if not REGION.search(text):
        print(f"{document}: no <!-- count --> region", file=sys.stderr)
        return 1
    document.write_text(REGION.sub(lambda _: table(), text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
