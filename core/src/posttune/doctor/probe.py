"""Imports in a process of their own, so that a crash or a hang there is one line here."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from posttune.doctor.findings import Finding
from posttune.doctor.inventory import Inventory
from posttune.doctor.plugins import offered

DEADLINE = 180.0
HEAVY = ("torch", "transformers", "vllm", "sglang", "sympy", "bert_score", "peft", "pyarrow")


@dataclass(frozen=True)
class Target:
    """What is imported: a plugin, or the module of an engine."""

    kind: str  # empty for a module
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.kind else f"import {self.name}"


def import_findings(inventory: Inventory, wanted: Sequence[str], deadline: float) -> Iterator[Finding]:
    """Import every plugin of the wanted distributions and every engine of theirs that is installed."""
    for owner in wanted:
        targets = [Target(kind, name) for kind, name in offered(inventory, owner)]
        targets += [Target("", name) for name in engine_modules(inventory, owner)]
        found = list(_probe_all(owner, targets, deadline))
        yield from found
        failed = {finding.subject for finding in found if finding.severity == "error"}
        fine = [str(target) for target in targets if str(target) not in failed]
        if fine:
            cause = f"{len(fine)} of {len(targets)}: {', '.join(fine)}"
            yield Finding("imported", "info", owner, cause, "posttune plugins list --load")


def engine_modules(inventory: Inventory, owner: str) -> list[str]:
    """The top-level modules of what a plugin's extra [engine] asks for, where that is installed."""
    direct = [need for need in inventory.closure(owner).needs if need.engine and need.depth == 1]
    names = {canonicalize_name(need.requirement.name) for need in direct}
    if not names:
        return []
    modules = importlib.metadata.packages_distributions()
    found = [
        module
        for module, distributions in modules.items()
        if any(canonicalize_name(each) in names for each in distributions)
    ]
    return sorted(module for module in found if module.isidentifier() and not module.startswith("_"))


def _probe_all(owner: str, targets: list[Target], deadline: float) -> Iterator[Finding]:
    """One process for all; where one target ends it, another process goes on after that one."""
    at = 0
    while at < len(targets):
        notes, ending = _run(targets[at:], deadline)
        for target, note in zip(targets[at:], notes, strict=False):
            yield from _judged(target, note, owner)
        at += len(notes)
        if at < len(targets):
            yield _ended(targets[at], ending, owner, deadline)
            at += 1


def _judged(target: Target, note: dict[str, object], owner: str) -> Iterator[Finding]:
    if note["error"]:
        fix = f"POSTTUNE_TRACEBACK=1 posttune plugins show {target}" if target.kind else _reinstall(owner)
        yield Finding("import-failed", "error", str(target), str(note["error"]), fix)
    heavy = note["heavy"]
    if target.kind and isinstance(heavy, list) and heavy:
        cause = f"importing it imports {', '.join(heavy)}"
        yield Finding("import-heavy", "warning", str(target), cause, "import them inside the hooks")


def _ended(target: Target, ending: str, owner: str, deadline: float) -> Finding:
    if ending == "timeout":
        cause = f"its import did not end within {deadline:g} s"
        return Finding("import-timeout", "error", str(target), cause, _reinstall(owner))
    return Finding("import-crashed", "error", str(target), f"its import {ending}", _reinstall(owner))


def _reinstall(owner: str) -> str:
    return f'pip install --force-reinstall "{owner}[engine]", in an environment of its own'


def _run(targets: list[Target], deadline: float) -> tuple[list[dict[str, object]], str]:
    """The notes about the targets that were done, and how the process ended."""
    with tempfile.TemporaryDirectory(prefix="posttune-doctor-") as folder:
        notes = Path(folder, "notes.jsonl")
        notes.touch()
        command = [sys.executable, "-m", "posttune.doctor.imports", str(notes)]
        command += [f"{target.kind}:{target.name}" for target in targets]
        ending = _wait(command, notes, len(targets), deadline)
        lines = notes.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], ending


def _wait(command: list[str], notes: Path, count: int, deadline: float) -> str:
    """Wait as long as each target stays within the deadline."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    done = -1
    try:
        while True:
            now = len(notes.read_text(encoding="utf-8").splitlines())
            if now == done:
                return "timeout"
            done = now
            try:
                return _described(process.wait(deadline if now < count else 10))
            except subprocess.TimeoutExpired:
                continue
    finally:
        _kill(process)


def _described(code: int) -> str:
    if code < 0:
        return f"killed the interpreter ({signal.Signals(-code).name})"
    return f"ended the interpreter with status {code}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
