"""Size limits of the house: functions under 60 lines, modules of at most 400.

Usage: python tools/limits.py FOLDER...
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FUNCTION_LINES = 60
MODULE_LINES = 400


@dataclass(frozen=True)
class Report:
    """What was measured, and what is too long."""

    functions: list[int]
    modules: list[int]
    violations: list[str]


def modules(folders: list[Path]) -> Iterator[Path]:
    """Python files under the folders; those of the cookiecutter are not Python yet."""
    for folder in folders:
        yield from sorted(path for path in folder.rglob("*.py") if "template" not in path.parts)


def functions(tree: ast.Module) -> Iterator[tuple[str, int, int]]:
    """Name, first line and length of every function; decorators do not count."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            last = node.end_lineno or node.lineno
            yield node.name, node.lineno, last - node.lineno + 1


def measure(folders: list[Path]) -> Report:
    """Measure every module under the folders."""
    report = Report([], [], [])
    for path in modules(folders):
        source = path.read_text(encoding="utf-8")
        length = len(source.splitlines())
        report.modules.append(length)
        if length > MODULE_LINES:
            report.violations.append(f"{path}: {length} lines, at most {MODULE_LINES}")
        for name, line, size in functions(ast.parse(source, str(path))):
            report.functions.append(size)
            if size >= FUNCTION_LINES:
                report.violations.append(f"{path}:{line}: {name} has {size} lines, under {FUNCTION_LINES}")
    return report


def main(arguments: list[str]) -> int:
    """Print the violations and a summary; 1 if there is a violation, 2 if nothing was measured."""
    report = measure([Path(argument) for argument in arguments])
    if not report.functions:
        print("limits: no function found: name the folders to measure", file=sys.stderr)
        return 2
    for violation in report.violations:
        print(violation)
    ordered = sorted(report.functions)
    print(
        f"limits: {len(report.modules)} modules, longest {max(report.modules)} lines; "
        f"{len(ordered)} functions, median {statistics.median(ordered):g}, "
        f"90 % up to {ordered[int(0.9 * (len(ordered) - 1))]}, longest {ordered[-1]}"
    )
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
