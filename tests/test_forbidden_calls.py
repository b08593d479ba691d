"""Calls that have no place in the sources of core and plugins: found by their syntax, not by their text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TIMERS = {"SIGALRM", "alarm", "setitimer"}
UNPICKLERS = {"load", "loads", "Unpickler"}
MAY_UNPICKLE = {
    ROOT / "core/src/posttune/checkpoint/dcp.py",  # an index, with a list of the names that it allows
    ROOT / "core/src/posttune/execution/worker.py",  # from the pipe of the process that started it
}


def modules() -> Iterator[tuple[Path, ast.Module]]:
    folders = [ROOT / "core/src", *(ROOT / "plugins").glob("*/src")]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py") if "{{" not in str(path)):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def timers(tree: ast.AST) -> list[int]:
    """Lines that name a timer of signals: it works on the main thread alone."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in TIMERS
        and isinstance(node.value, ast.Name)
        and node.value.id == "signal"
    ]


def unpickling(tree: ast.AST) -> list[int]:
    """Lines that read a pickle, which may execute anything; ``torch.load`` may with ``weights_only=True``."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        if node.value.id in ("pickle", "dill", "cloudpickle", "joblib") and node.attr in UNPICKLERS:
            found.append(node.lineno)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if ast.unparse(call.func) == "torch.load":
            safe = {key.arg: key.value for key in call.keywords}.get("weights_only")
            if not (isinstance(safe, ast.Constant) and safe.value is True):
                found.append(call.lineno)
    return found


def swallowing(tree: ast.AST) -> list[int]:
    """Handlers of every error that do nothing at all."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
        and all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)
    ]


def test_no_timer_of_signals() -> None:
    assert {str(path): lines for path, tree in modules() if (lines := timers(tree))} == {}


def test_no_pickle_is_read() -> None:
    found = {path: lines for path, tree in modules() if (lines := unpickling(tree))}
    assert set(found) <= MAY_UNPICKLE, found


def test_no_error_is_swallowed() -> None:
    assert {str(path): lines for path, tree in modules() if (lines := swallowing(tree))} == {}


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (timers, "import signal\nsignal.signal(signal.SIGALRM, f)"),
        (timers, "signal.alarm(3)"),
        (timers, "signal.setitimer(signal.ITIMER_REAL, 1)"),
        (unpickling, "pickle.loads(data)"),
        (unpickling, "class Mine(pickle.Unpickler): pass"),
        (unpickling, "torch.load(path)"),
        (unpickling, "torch.load(path, weights_only=False)"),
        (swallowing, "try:\n    f()\nexcept Exception:\n    pass"),
        (swallowing, "for x in y:\n    try:\n        f()\n    except:\n        continue"),
    ],
)
def test_the_checks_see_what_they_should(check: object, text: str) -> None:
    assert callable(check)
    assert check(ast.parse(text))
    assert not check(ast.parse("import signal\nsignal.signal(signal.SIGTERM, f)\npickle.dumps(x)"))
