"""metrics.jsonl: whole lines, cut back when a run is resumed."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from posttune.observers.jsonl import JsonlConfig, JsonlObserver
from posttune.types import Outcome, RunInfo


def run_info(folder: Path, **fields: object) -> RunInfo:
    known = {"name": "run", "stage": "rl", "kind": "rl", "total_steps": 9, "first_step": 0, "config": {}}
    return RunInfo(folder=folder, **(known | fields))  # type: ignore[arg-type]


def started(folder: Path, **fields: object) -> JsonlObserver:
    observer = JsonlObserver(JsonlConfig())
    observer.observer_run_start(run=run_info(folder, **fields))
    return observer


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["global_step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write(observer: JsonlObserver, *numbers: int, stage: str = "rl") -> None:
    for number in numbers:
        observer.observer_step(stage=stage, step=number, metrics={"global_step": number, "kl": 0.5})


def test_a_line_holds_stage_step_and_metrics_and_is_there_at_once(tmp_path: Path) -> None:
    observer = started(tmp_path)
    write(observer, 1)
    line = (tmp_path / "metrics.jsonl").read_text()
    assert line.endswith("\n")
    assert json.loads(line) == {"stage": "rl", "step": 1, "global_step": 1, "kl": 0.5}
    observer.observer_run_end(outcome=Outcome("rl", "finished", 1))


def test_what_is_not_finite_is_absent(tmp_path: Path) -> None:
    observer = started(tmp_path)
    observer.observer_step(stage="rl", step=1, metrics={"loss": math.nan, "kl": math.inf, "lr": 1.0})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"stage": "rl", "step": 1, "lr": 1.0}


def test_a_resumed_run_drops_later_lines_and_a_torn_one(tmp_path: Path) -> None:
    first = started(tmp_path)
    write(first, 1, 2, 3, 4)
    first.observer_run_end(outcome=Outcome("rl", "failed", 4))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "rl", "global_st')
    second = started(tmp_path, first_step=2, first_global_step=2)
    write(second, 3)
    assert steps(tmp_path) == [1, 2, 3]


def test_a_later_stage_keeps_what_is_there(tmp_path: Path) -> None:
    first = started(tmp_path, stage="sft", first_global_step=0)
    write(first, 1, 2, stage="sft")
    second = started(tmp_path, first_global_step=2)
    write(second, 3)
    assert steps(tmp_path) == [1, 2, 3]


def test_a_stage_without_global_steps_replaces_its_own_lines_alone(tmp_path: Path) -> None:
    for _ in range(2):
        observer = started(tmp_path, stage="before", kind="evaluate", first_global_step=None)
        observer.observer_step(stage="before", step=1, metrics={"global_step": 7, "val/accuracy": 0.5})
    write(started(tmp_path, first_step=7, first_global_step=7), 8)
    assert steps(tmp_path) == [7, 8]


@pytest.mark.parametrize("outcome", ["finished", "failed", "interrupted"])
def test_it_can_end_without_having_begun(outcome: str) -> None:
    JsonlObserver(JsonlConfig()).observer_run_end(outcome=Outcome("rl", outcome, 0))  # type: ignore[arg-type]


def test_lines_are_on_the_disk_once_a_checkpoint_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda number: flushed.append(str(Path(f"/proc/self/fd/{number}").readlink()))
    )
    observer = started(tmp_path)
    write(observer, 1)
    observer.observer_checkpoint()
    assert flushed == [str((tmp_path / "metrics.jsonl").resolve())]
    observer.observer_run_end(outcome=Outcome("rl", "finished", 1))
    observer.observer_checkpoint()  # an observer may be told late
    assert len(flushed) == 1
