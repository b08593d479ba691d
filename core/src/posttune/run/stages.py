"""What every stage is given and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttune.config.models import RunConfig
from posttune.run.folder import RunFolder
from posttune.run.interrupt import InterruptFlag

if TYPE_CHECKING:
    from posttune.distributed.ranks import Ranks
    from posttune.facade import Observers

__all__ = ["InterruptFlag", "StageContext", "StageResult"]


@dataclass(frozen=True)
class StageResult:
    """What a stage made: a folder that later stages can name, metrics, and its wall time.

    The runner sets ``seconds`` (over all attempts of a resumed stage) and ``skipped``: an earlier run
    had finished the stage, and these are its metrics and seconds.
    """

    output: Path | None
    metrics: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    skipped: bool = False


@dataclass
class StageContext:
    """The run around a stage. ``outputs`` holds the outputs of earlier stages by name."""

    run: RunConfig
    name: str
    folder: RunFolder
    observers: Observers
    resume: bool
    outputs: Mapping[str, Path]
    interrupt: InterruptFlag
    ranks: Ranks

    def resolve(self, value: str) -> Path:
        """The output of the earlier stage of that name, or else the path as it stands."""
        return self.outputs.get(value, Path(value).expanduser())
