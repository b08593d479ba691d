"""Conformance of an observer.

class TestMine(ObserverSuite):
    name = "mine"

``requires``: ``silent`` (prints nothing on standard output), ``contained`` (writes nowhere but into the
run folder).
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from posttune.testing._streams import stdout_of
from posttune.testing.plugin_suite import PluginSuite
from posttune.types import Outcome, RunInfo

METRICS: dict[str, float | int] = {"loss": 0.5, "reward/mean": 0.25, "lr": 1e-5, "tokens": 1200}
HOSTILE: dict[str, float | int] = {
    "nan": math.nan, "inf": math.inf, "minus": -math.inf, "huge": 10**30, "tiny": 5e-324, "zero": 0,
    "with space": 1.0, "reward/ümläut 🙂/mean": 1.0, "a/b/c/d/e": 2, "": 3.0, "x" * 300: 4.0,
}  # fmt: skip


class ObserverSuite(PluginSuite):
    """What every observer must do."""

    kind: ClassVar[str] = "observer"
    requires = frozenset({"silent", "contained"})

    def run_info(self, folder: Path, *, first_step: int = 0, total: int | None = 3) -> RunInfo:
        """A run of three steps."""
        config = {"name": "run", "output": str(folder), "stages": {"rl": {"kind": "rl"}}}
        return RunInfo(folder, "run", "rl", "rl", total, first_step, config, first_step)

    def table(self, rows: int = 2) -> Any:
        """The samples of a step."""
        import pyarrow as pa

        columns: dict[str, Any] = {
            "step": pa.array([1] * rows, pa.int64()),
            "prompt_id": [f"p{row}" for row in range(rows)],
            "prompt": ["What is 1 + 1? 🙂"] * rows,
            "completion": ["2\x00\n" * 3] * rows,
            "reward": pa.array([0.5, None, 1.0][:rows], pa.float64()),
            "advantage": pa.array([[0.1, -0.1]] * rows, pa.list_(pa.float32())),
            "weight_version": pa.array([1] * rows, pa.int64()),
        }
        return pa.table(columns).replace_schema_metadata({"global_step": "1"})

    def observers(self, member: Any = None) -> Any:
        """The observer behind the facade, which guards it."""
        from posttune.facade.observers import Observers

        return Observers([member or self.member()])

    def drive(self, observers: Any, folder: Path, *, steps: int = 3, status: str = "finished") -> None:
        """One stage from its start to its end."""
        ending: Literal["finished", "failed"] = "finished" if status == "finished" else "failed"
        checkpoint = folder / "checkpoints" / "global_step_2"
        checkpoint.mkdir(parents=True, exist_ok=True)
        observers.run_start(self.run_info(folder))
        for step in range(1, steps + 1):
            observers.step("rl", step, METRICS)
            observers.samples("rl", step, self.table())
        observers.checkpoint(checkpoint, 2)
        observers.run_end(Outcome("rl", ending, steps, "" if status == "finished" else "it broke"))

    def _fine(self, observers: Any) -> None:
        assert observers.disabled == {}, observers.disabled

    def test_a_whole_run(self) -> None:
        """Start, steps, samples, a checkpoint and the end go without an error."""
        with _folder() as folder:
            observers = self.observers()
            self.drive(observers, folder)
            self._fine(observers)

    def test_several_stages(self) -> None:
        """One instance sees all stages of a run, one after the other."""
        with _folder() as folder:
            observers = self.observers()
            self.drive(observers, folder)
            self.drive(observers, folder)
            self._fine(observers)

    def test_a_run_that_fails(self) -> None:
        """The end comes after a failure too, perhaps before any step."""
        with _folder() as folder:
            observers = self.observers()
            self.drive(observers, folder, status="failed")
            observers.run_start(self.run_info(folder))
            observers.run_end(Outcome("rl", "interrupted", 0, "stopped"))
            self._fine(observers)

    def test_the_end_without_a_start(self) -> None:
        """A run may fail before anything began, and end twice."""
        with _folder() as folder:
            observers = self.observers()
            outcome = Outcome("rl", "failed", 0, f"nothing in {folder}")
            observers.run_end(outcome)
            observers.run_end(outcome)
            self._fine(observers)

    def test_a_run_that_is_resumed(self) -> None:
        """The first step is not always 1, and the number of steps is not always known."""
        with _folder() as folder:
            observers = self.observers()
            observers.run_start(self.run_info(folder, first_step=5, total=None))
            for step in (6, 7):
                observers.step("rl", step, METRICS)
                observers.samples("rl", step, self.table())
            observers.run_end(Outcome("rl", "finished", 7))
            self._fine(observers)

    def test_any_number_may_come(self) -> None:
        """NaN, infinity, integers without end, and names of every sort."""
        with _folder() as folder:
            observers = self.observers()
            observers.run_start(self.run_info(folder))
            for step, metrics in enumerate(({}, HOSTILE, METRICS), start=1):
                observers.step("rl", step, metrics)
            observers.run_end(Outcome("rl", "finished", 3))
            self._fine(observers)

    def test_metrics_may_come_and_go(self) -> None:
        """A quantity that does not exist in a step is absent from it."""
        with _folder() as folder:
            observers = self.observers()
            observers.run_start(self.run_info(folder))
            for step in range(1, 6):
                observers.step("rl", step, {f"metric/{step}": 1.0, "loss": 0.1})
            observers.run_end(Outcome("rl", "finished", 5))
            self._fine(observers)

    def test_a_step_without_samples(self) -> None:
        """A table may have no rows."""
        with _folder() as folder:
            observers = self.observers()
            observers.run_start(self.run_info(folder))
            observers.samples("rl", 1, self.table(rows=0))
            observers.run_end(Outcome("rl", "finished", 1))
            self._fine(observers)

    def test_it_leaves_metrics_alone(self) -> None:
        """All observers get the same objects: nothing is written into them."""
        with _folder() as folder:
            observers, metrics = self.observers(), dict(METRICS)
            info = self.run_info(folder)
            before = copy.deepcopy((metrics, info.config))
            observers.run_start(info)
            observers.step("rl", 1, metrics)
            observers.run_end(Outcome("rl", "finished", 1))
            assert (metrics, info.config) == before
            self._fine(observers)

    def test_it_writes_into_the_run_folder_only(self) -> None:
        """A run is one folder: what is elsewhere is not moved or removed with it."""
        if "contained" not in self.requires:
            return
        with _folder() as folder, _folder() as elsewhere, contextlib.chdir(elsewhere):
            self.drive(self.observers(), folder)
            assert list(elsewhere.rglob("*")) == []

    def test_it_prints_nothing(self) -> None:
        """Standard output belongs to the command."""
        if "silent" in self.requires:
            with _folder() as folder, stdout_of() as output:
                self.drive(self.observers(), folder)
            assert output.text == ""

    def test_a_folder_that_is_gone_ends_no_run(self) -> None:
        """Whatever it raises is of a sort that the guard can take: the training goes on."""
        with _folder() as folder:
            observers = self.observers()
            gone = folder / "gone"
            gone.write_text("a file, where a folder should be", encoding="utf-8")
            info = self.run_info(gone)
            observers.run_start(info)
            observers.step("rl", 1, METRICS)
            observers.samples("rl", 1, self.table())
            observers.run_end(Outcome("rl", "failed", 1))
            assert gone.is_file()

    def test_two_runs_at_a_time(self) -> None:
        """Two instances with folders of their own do not mix their files."""
        with _folder() as one, _folder() as two:
            first, second = self.observers(), self.observers()
            first.run_start(self.run_info(one))
            second.run_start(self.run_info(two))
            first.step("rl", 1, METRICS)
            first.samples("rl", 1, self.table())
            kept = _files(two)
            first.step("rl", 2, METRICS)
            first.run_end(Outcome("rl", "finished", 2))
            assert _files(two) == kept
            second.run_end(Outcome("rl", "finished", 0))
            self._fine(first)
            self._fine(second)


def _files(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()
    }


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="posttune-kit-") as name:
        yield Path(os.path.realpath(name))
