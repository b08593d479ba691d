"""Checkpoints that are written in the background."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_toy as toy
from posttune.checkpoint import dcp, store
from posttune.errors import CheckpointError, Interrupted, RunError
from posttune.facade import Observers
from posttune.run.stages import InterruptFlag
from posttune.types import Metrics

pytestmark = pytest.mark.slow

ASYNC = {"checkpoint": {"every": 1, "async_save": True}}
write = dcp.write


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_the_same_run_and_the_same_checkpoints(task: Path, tmp_path: Path, kind: str) -> None:
    stage = getattr(toy, kind)(task, checkpoint={"every": 1})
    toy.run_stage(tmp_path / "at-once", stage)
    toy.run_stage(tmp_path / "background", toy.merged(stage, ASYNC))
    for step in (1, 2):
        toy.assert_same_checkpoint(
            *(tmp_path / name / "checkpoints" / f"global_step_{step}" for name in ("at-once", "background")),
        )
    toy.assert_same_run(tmp_path / "at-once", tmp_path / "background", 3)


class Slow:
    """A disk that is as slow as the test wants. Knows which thread wrote what."""

    def __init__(self) -> None:
        self.go, self.began = threading.Event(), threading.Event()
        self.threads: list[str] = []

    def __call__(self, folder: Path, tensors: Mapping[str, torch.Tensor], **more: Any) -> None:
        self.threads.append(threading.current_thread().name)
        self.began.set()
        assert self.go.wait(60)
        write(folder, tensors, **more)


def test_steps_go_on_while_it_is_written(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    seen: list[tuple[int, bool]] = []  # step, whether a checkpoint was whole by then
    told: list[tuple[str, int]] = []
    monkeypatch.setattr(dcp, "write", slow)
    step, checkpoint = Observers.step, Observers.checkpoint

    def watched(self: Observers, stage: str, number: int, metrics: Metrics) -> None:
        step(self, stage, number, metrics)
        seen.append((number, store.latest(tmp_path / "checkpoints") is not None))
        if number == 3:
            slow.go.set()

    def heard(self: Observers, path: Path, number: int) -> None:
        checkpoint(self, path, number)
        told.append((path.name, number))

    monkeypatch.setattr(Observers, "step", watched)
    monkeypatch.setattr(Observers, "checkpoint", heard)
    stage = toy.sft(task, steps=5, checkpoint={"every": 2, "async_save": True, "keep_last": 1})
    toy.run_stage(tmp_path, stage)
    assert seen[:3] == [(1, False), (2, False), (3, False)]  # step 3 came while 2 was being written
    assert set(slow.threads) == {"checkpoint"}
    assert told == [("global_step_2", 2), ("global_step_4", 4), ("global_step_5", 5)]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["global_step_5"]


def test_what_is_written_is_the_state_of_its_step(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write of step 1 begins only when step 3 is done."""
    stage = toy.sft(task, steps=3, checkpoint={"every": 1})
    toy.run_stage(tmp_path / "at-once", stage)
    slow = Slow()
    monkeypatch.setattr(dcp, "write", slow)
    timer = threading.Timer(3.0, slow.go.set)
    timer.start()
    stage = toy.merged(stage, {"checkpoint": {"every": 0, "async_save": True}})
    flag = InterruptFlag()
    flag.set()
    with pytest.raises(Interrupted):  # waits for the write
        toy.run_stage(tmp_path / "background", stage, interrupt=flag)
    paths = [tmp_path / name / "checkpoints" / "global_step_1" for name in ("at-once", "background")]
    assert store.what_is_missing(paths[1]) is None
    toy.assert_same_checkpoint(*paths)
    timer.cancel()


def failing(after: int) -> Any:
    calls: list[int] = []

    def fail(folder: Path, tensors: Mapping[str, torch.Tensor], **more: Any) -> None:
        calls.append(1)
        if len(calls) > after:
            raise CheckpointError("the disk is on fire", who=str(folder))
        write(folder, tensors, **more)

    return fail


def test_a_failure_ends_the_run_and_leaves_the_one_before(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp, "write", failing(after=1))
    stage = toy.sft(task, steps=9, checkpoint={"every": 1, "async_save": True})
    with pytest.raises(CheckpointError, match=r"global_step_2: could not be written: the disk is on fire"):
        toy.run_stage(tmp_path, stage)
    assert len(toy.metrics(tmp_path)) <= 3  # the save after it at the latest
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["global_step_1"]
    monkeypatch.undo()
    toy.run_stage(tmp_path, stage, resume=True)
    assert [line["step"] for line in toy.metrics(tmp_path)] == list(range(1, 10))


def test_a_run_that_fails_waits_for_what_is_being_written(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttune.trainer.sft import SftWork

    slow, step = Slow(), SftWork.step
    monkeypatch.setattr(dcp, "write", slow)

    def breaks(self: SftWork, position: Any) -> Any:
        if position.step == 1:
            threading.Timer(0.5, slow.go.set).start()
            raise RunError("the second step fails")
        return step(self, position)

    monkeypatch.setattr(SftWork, "step", breaks)
    with pytest.raises(RunError, match="the second step fails"):
        toy.run_stage(tmp_path, toy.sft(task, **ASYNC))
    assert store.latest(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "global_step_1"
