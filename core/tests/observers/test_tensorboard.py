"""The observer of TensorBoard, read back by TensorBoard's own reader."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from posttune.config.models import PluginRef
from posttune.errors import PluginOptionsError
from posttune.facade import build_observers
from posttune.observers.tensorboard import TensorBoardConfig, TensorBoardObserver, flat, markdown
from posttune.types import Outcome, RunInfo

pytest.importorskip("tensorboard", reason="the extra posttune[tensorboard] is not installed")

from posttune.observers import _events
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event

CONFIG = {"name": "toy", "seed": 3, "stages": {"rl": {"kind": "rl", "optimizer": {"lr": 1e-5}, "steps": 9}}}


def info(folder: Path, *, stage: str = "rl", first: int = 0, first_global: int | None = 0) -> RunInfo:
    return RunInfo(folder, "toy", stage, "rl", 9, first, CONFIG, first_global)


def table(step: int) -> pa.Table:
    rows = {"prompt": ["1+1=", "a|b"], "completion": ["2", "x\ny" * 900], "reward": [1.0, 0.123456]}
    return pa.table(rows).replace_schema_metadata({"global_step": str(step)})


def observe(observer: TensorBoardObserver, run: RunInfo, steps: range) -> None:
    observer.observer_run_start(run)
    for step in steps:
        observer.observer_step(step, {"loss": 1 / step, "global_step": step, "kl": float(step)})
        observer.observer_samples(step, table(step))
    observer.observer_run_end(Outcome(run.stage, "finished", steps.stop - 1))


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """From the files themselves: a reader makes its own of steps that come twice."""
    found = []
    for path in folder.iterdir():
        for record in _events.read(path):
            event = Event.FromString(record)
            found += [
                (event.step, value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value)
                for value in event.summary.value
                if value.tag == tag
            ]
    return sorted(found)


def texts(folder: Path, tag: str) -> dict[int, str]:
    found = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    found.Reload()
    return {
        event.step: event.tensor_proto.string_val[0].decode()
        for event in found.Tensors(f"{tag}/text_summary")
    }


def test_curves_samples_and_settings(tmp_path: Path) -> None:
    observe(TensorBoardObserver(TensorBoardConfig()), info(tmp_path), range(1, 12))
    folder = tmp_path / "tensorboard" / "rl"
    assert scalars(folder, "kl") == [(step, float(step)) for step in range(1, 12)]
    assert [step for step, _ in scalars(folder, "loss")] == list(range(1, 12))
    shown = texts(folder, "samples")
    assert list(shown) == [1, 10]
    assert "| 1+1= | 2 | 1 |" in shown[1]
    assert r"| a\|b | x<br>yx" in shown[1]
    assert shown[1].endswith("… | 0.1235 |")
    assert "    name: toy\n" in texts(folder, "config")[0]
    found = EventAccumulator(str(folder))
    found.Reload()
    assert found.SummaryMetadata("_hparams_/session_start_info").plugin_data.plugin_name == "hparams"


def test_fewer_points_and_no_samples(tmp_path: Path) -> None:
    observer = TensorBoardObserver(TensorBoardConfig(every=3, samples=0))
    observer.observer_run_start(info(tmp_path))
    for step in range(1, 8):
        metrics = {"loss": 1.0, "global_step": step} | ({"val/accuracy": 0.5} if step == 4 else {})
        observer.observer_step(step, metrics)
        observer.observer_samples(step, table(step))
    observer.observer_run_end(Outcome("rl", "finished", 7))
    folder = tmp_path / "tensorboard" / "rl"
    assert [step for step, _ in scalars(folder, "loss")] == [3, 4, 6]
    with pytest.raises(KeyError):
        texts(folder, "samples")


def test_a_resumed_run_is_cut_back_to_its_checkpoint(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    observe(TensorBoardObserver(TensorBoardConfig()), info(whole), range(1, 12))
    observe(TensorBoardObserver(TensorBoardConfig()), info(parts), range(1, 11))  # killed after step 10
    observe(TensorBoardObserver(TensorBoardConfig()), info(parts, first=6, first_global=6), range(7, 12))
    for tag in ("loss", "kl"):
        folders = [folder / "tensorboard" / "rl" for folder in (whole, parts)]
        assert scalars(folders[0], tag) == scalars(folders[1], tag)
    assert texts(parts / "tensorboard" / "rl", "samples").keys() == {1, 10}
    assert len(texts(parts / "tensorboard" / "rl", "config")) == 1


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_last_event_is_cut_off(tmp_path: Path, cut: int) -> None:
    observe(TensorBoardObserver(TensorBoardConfig()), info(tmp_path), range(1, 5))
    (path,) = (tmp_path / "tensorboard" / "rl").iterdir()
    path.write_bytes(path.read_bytes()[:-cut])
    observe(TensorBoardObserver(TensorBoardConfig()), info(tmp_path, first=3, first_global=3), range(4, 6))
    assert scalars(tmp_path / "tensorboard" / "rl", "kl") == [(step, float(step)) for step in range(1, 6)]


def test_a_stage_that_begins_again_leaves_nothing_of_before(tmp_path: Path) -> None:
    observe(TensorBoardObserver(TensorBoardConfig()), info(tmp_path), range(1, 5))
    observe(TensorBoardObserver(TensorBoardConfig()), info(tmp_path), range(1, 3))
    assert [step for step, _ in scalars(tmp_path / "tensorboard" / "rl", "loss")] == [1, 2]


def test_another_stage_keeps_the_first_ones_curves(tmp_path: Path) -> None:
    observe(TensorBoardObserver(TensorBoardConfig()), info(tmp_path, stage="sft"), range(1, 4))
    observe(TensorBoardObserver(TensorBoardConfig()), info(tmp_path, first_global=3), range(4, 6))
    assert [step for step, _ in scalars(tmp_path / "tensorboard" / "sft", "kl")] == [1, 2, 3]
    assert [step for step, _ in scalars(tmp_path / "tensorboard" / "rl", "kl")] == [4, 5]


def test_it_is_found_by_its_name_and_brings_no_torch() -> None:
    script = (
        "import json, sys; from posttune.facade import build_observers; "
        "from posttune.config.models import PluginRef; "
        "build_observers([PluginRef(name='tensorboard')]); "
        "print(json.dumps([m for m in ('torch', 'tensorboard', 'pyarrow') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PluginOptionsError, match=r"pip install 'posttune\[tensorboard\]'"):
        build_observers([PluginRef(name="tensorboard")])


def test_settings_are_scalars() -> None:
    nested: dict[str, Any] = {"a": {"b": 1, "c": None}, "d": [1, 2], "e": True}
    assert dict(flat(nested)) == {"a.b": 1, "d": "[1, 2]", "e": True}


def test_nothing_of_a_sample_breaks_the_table() -> None:
    rows = pa.table({"prompt": ["a\n| b \\"], "reward": [None]})
    assert markdown(rows, 100).splitlines()[2:] == [r"| a<br>\| b \\ | None |"]
