"""rollouts/step_NNNNNN.parquet: what the model answered, how it was judged, and what was made of it."""

from __future__ import annotations

import re
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from posttune.config.models import Positive, Strict
from posttune.files import atomic_write_bytes
from posttune.hookspecs import hookimpl

if TYPE_CHECKING:
    import pyarrow as pa

    from posttune.types import RunInfo

FOLDER_NAME = "rollouts"
GLOBAL_STEP = b"global_step"
_FILE = re.compile(r"step_(\d+)\.parquet")


class RolloutsConfig(Strict):
    """How much is kept."""

    every: Positive = Field(1, description="Steps between files.")
    limit: Positive | None = Field(None, description="Rows of a step that are kept; all where none is given.")


class RolloutsObserver:
    """Writes the samples of a step as one Parquet file, whole or not at all.

    Files are numbered by the global step, as checkpoints are. When a run is resumed, those after its
    checkpoint are removed first.
    """

    Config = RolloutsConfig

    def __init__(self, config: RolloutsConfig) -> None:
        self.config = config
        self._folder: Path | None = None

    @hookimpl
    def observer_run_start(self, run: RunInfo) -> None:
        """Remove what lies after the step where the stage begins."""
        self._folder = run.folder / FOLDER_NAME
        if run.first_global_step is not None:
            cut_back(self._folder, run.first_global_step)

    @hookimpl
    def observer_samples(self, step: int, table: pa.Table) -> None:
        """Write the step's file."""
        if self._folder is None or step % self.config.every:
            return
        number = int((table.schema.metadata or {}).get(GLOBAL_STEP, step))
        atomic_write_bytes(
            self._folder / f"step_{number:06d}.parquet", _parquet(table.slice(0, self.config.limit))
        )


def cut_back(folder: Path, global_step: int) -> None:
    """Remove the files of steps after ``global_step``."""
    for path in folder.glob("step_*.parquet"):
        match = _FILE.fullmatch(path.name)
        if match and int(match.group(1)) > global_step:
            path.unlink()


def _parquet(table: pa.Table) -> bytes:
    import pyarrow.parquet as pq

    buffer = BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()
