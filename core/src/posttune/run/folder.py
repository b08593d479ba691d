"""The folder of a run: where everything lies, and which stages have ended."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from posttune.errors import RunError, UserError
from posttune.files import atomic_write_text

StageStatus = Literal["running", "finished", "interrupted", "failed"]


@dataclass(frozen=True)
class StageMarker:
    """What a run remembers of a stage. ``config`` is its resolved configuration, with the run's seed."""

    status: StageStatus
    kind: str
    digest: str
    config: Mapping[str, Any]
    output: str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    first_checkpoint: int = 0  # the last global step that had a checkpoint when the stage began


class RunFolder:
    """Paths of a run. Nothing is made until it is written to."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).expanduser()

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    def data(self, stage: str) -> Path:
        """The dataset that a convert stage writes where it names no other place."""
        return self.path / "data" / stage

    def model(self, stage: str) -> Path:
        """The Hugging Face folder that a training stage writes at its end."""
        return self.path / "models" / stage

    @property
    def checkpoints(self) -> Path:
        """Holds ``global_step_N``."""
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        """What an export stage writes where it names no other place."""
        return self.path / "export"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        """Parquet files of samples."""
        return self.path / "rollouts"

    @property
    def resolved(self) -> Path:
        """The configuration with every default filled in."""
        return self.path / "resolved.yaml"

    @property
    def environment(self) -> Path:
        """Versions, machine, git state and arguments."""
        return self.path / "environment.json"

    @property
    def stages(self) -> Path:
        """Holds one marker a stage."""
        return self.path / "stages"

    def holds_run(self) -> bool:
        """Whether a run began here."""
        return any(path.exists() for path in (self.resolved, self.stages, self.metrics, self.checkpoints))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and keep other runs out of it. Raises UserError where one is in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            self._lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            fix = "wait for it to end, or choose another output:"
            raise UserError("another process runs in this folder", who=str(self.path), fix=fix) from error

    def last_checkpoint_step(self) -> int:
        """The highest N of ``checkpoints/global_step_N``; 0 where there is none."""
        names = [entry.name for entry in self.checkpoints.glob("global_step_*")]
        return max((int(name[12:]) for name in names if name[12:].isdigit()), default=0)

    def read_marker(self, stage: str) -> StageMarker | None:
        """What is remembered of a stage. Raises RunError where the marker is damaged."""
        path = self._marker(stage)
        if not path.is_file():
            return None
        try:
            return StageMarker(**json.loads(path.read_text("utf-8")))
        except (ValueError, TypeError) as error:
            fix = "remove it to run the stage again"
            raise RunError(f"damaged stage marker: {error}", who=str(path), fix=fix) from error

    def write_marker(self, stage: str, marker: StageMarker) -> None:
        """Remember the state of a stage."""
        text = json.dumps(asdict(marker), indent=2, ensure_ascii=False, default=_plain)
        atomic_write_text(self._marker(stage), text + "\n")

    def stored(self, path: Path) -> str:
        """A path as a marker keeps it: relative where it lies in this folder, so that a run can be moved."""
        path, home = path.absolute(), self.path.absolute()
        return str(path.relative_to(home)) if path.is_relative_to(home) else str(path)

    def restored(self, stored: str) -> Path:
        """The path that a marker keeps."""
        return self.path / stored

    def _marker(self, stage: str) -> Path:
        return self.stages / f"{stage}.json"


def _plain(value: Any) -> Any:
    """A number of numpy or torch as Python's own; anything else as text."""
    return value.item() if hasattr(value, "item") else str(value)
