"""rollouts/step_NNNNNN.parquet: one whole file a step, cut back when a run is resumed."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from posttune.observers.rollouts import RolloutsConfig, RolloutsObserver
from posttune.types import RunInfo


def started(folder: Path, first_global_step: int | None = 0, **options: object) -> RolloutsObserver:
    observer = RolloutsObserver(RolloutsConfig.model_validate(options))
    observer.observer_run_start(run=RunInfo(folder, "run", "rl", "rl", 9, 0, {}, first_global_step))
    return observer


def table(global_step: int | None = None, rows: int = 3) -> pa.Table:
    made = pa.table({"reward": [float(row) for row in range(rows)]})
    return made if global_step is None else made.replace_schema_metadata({"global_step": str(global_step)})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "rollouts").iterdir())


def test_files_are_numbered_by_the_global_step(tmp_path: Path) -> None:
    observer = started(tmp_path)
    observer.observer_samples(step=1, table=table(global_step=251))
    observer.observer_samples(step=2, table=table())
    assert names(tmp_path) == ["step_000002.parquet", "step_000251.parquet"]
    assert pq.read_table(tmp_path / "rollouts" / "step_000251.parquet").column_names == ["reward"]


def test_every_and_limit_bound_what_is_kept(tmp_path: Path) -> None:
    observer = started(tmp_path, every=2, limit=2)
    for step in range(1, 6):
        observer.observer_samples(step=step, table=table(step))
    assert names(tmp_path) == ["step_000002.parquet", "step_000004.parquet"]
    assert len(pq.read_table(tmp_path / "rollouts" / "step_000002.parquet")) == 2


def test_a_resumed_run_removes_later_files(tmp_path: Path) -> None:
    observer = started(tmp_path)
    for step in range(1, 5):
        observer.observer_samples(step=step, table=table(step))
    (tmp_path / "rollouts" / "step_mine.parquet").touch()
    started(tmp_path, first_global_step=2)
    assert names(tmp_path) == ["step_000001.parquet", "step_000002.parquet", "step_mine.parquet"]
    started(tmp_path, first_global_step=None)
    assert len(names(tmp_path)) == 3
