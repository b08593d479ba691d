"""metrics.jsonl: one object a step."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from posttune.config.models import Strict
from posttune.files import atomic_write_text
from posttune.hookspecs import hookimpl

if TYPE_CHECKING:
    from posttune.types import Metrics, Outcome, RunInfo

FILE_NAME = "metrics.jsonl"


class JsonlConfig(Strict):
    """No options."""


class JsonlObserver:
    """Appends ``{"stage", "step", "global_step", ...}`` to ``metrics.jsonl`` of the run folder.

    A line is written whole and at once. When a run is resumed, the lines after its checkpoint are
    removed first. A value that is not finite has no place in JSON and is left out.
    """

    Config = JsonlConfig

    def __init__(self, config: JsonlConfig) -> None:
        self.config = config
        self._file: TextIO | None = None

    @hookimpl
    def observer_run_start(self, run: RunInfo) -> None:
        """Cut the file back to where the stage begins and open it."""
        path = run.folder / FILE_NAME
        cut_back(path, run)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    @hookimpl
    def observer_step(self, stage: str, step: int, metrics: Metrics) -> None:
        """Append one line."""
        if self._file is None:
            return
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._file.write(json.dumps({"stage": stage, "step": step} | finite) + "\n")

    @hookimpl
    def observer_checkpoint(self) -> None:
        """A checkpoint outlives a power failure, and so do the lines that led to it."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    @hookimpl
    def observer_run_end(self, outcome: Outcome) -> None:  # noqa: ARG002 (the hook's argument)
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def cut_back(path: Path, run: RunInfo) -> None:
    """Remove the lines of steps that are to come again, and a last one that a crash left unfinished."""
    if not path.is_file():
        return
    lines = path.read_text("utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and _stays(line, run)]
    if kept != lines:
        atomic_write_text(path, "".join(kept))


def _stays(line: str, run: RunInfo) -> bool:
    try:
        found = json.loads(line)
    except ValueError:
        return False
    if found.get("stage") == run.stage and found.get("step", 0) > run.first_step:
        return False
    return run.first_global_step is None or found.get("global_step", 0) <= run.first_global_step
