"""Curves, samples and the configuration for TensorBoard, under ``tensorboard/<stage>`` of the run folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self, cast

from pydantic import Field, model_validator

from posttune.config.models import NonNegative, Positive, Strict
from posttune.hookspecs import hookimpl

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa
    from torch.utils.tensorboard import SummaryWriter

    from posttune.types import Metrics, Outcome, RunInfo

FOLDER_NAME = "tensorboard"
GLOBAL_STEP = b"global_step"
_COLUMNS = ("prompt", "completion", "reward")


class TensorBoardConfig(Strict):
    """How much is written."""

    every: Positive = Field(default=1, description="Steps between points; validations always come.")
    samples: NonNegative = Field(default=4, description="Rows of a step that are shown as text; 0: none.")
    samples_every: Positive = Field(default=10, description="Steps between samples.")
    characters: Positive = Field(default=1000, description="Longest text of a cell.")

    @model_validator(mode="after")
    def _is_installed(self) -> Self:
        if importlib.util.find_spec("tensorboard") is None:
            raise ValueError(
                "the package tensorboard is not installed; run: pip install 'posttune[tensorboard]'"
            )
        return self


class TensorBoardObserver:
    """Writes event files, a run of TensorBoard for each stage; ``tensorboard --logdir`` shows them.

    The horizontal axis is the global step. Every step is on the disk before the next one begins; when
    a run is resumed, what lies after its checkpoint is removed from the files first.
    """

    Config = TensorBoardConfig

    def __init__(self, config: TensorBoardConfig) -> None:
        self.config = config
        self._writer: SummaryWriter | None = None

    @hookimpl
    def observer_run_start(self, run: RunInfo) -> None:
        """Cut the files back to where the stage begins, and open a new one."""
        from posttune.observers._events import cut_back

        folder = run.folder / FOLDER_NAME
        if run.first_global_step is not None:
            cut_back(folder, run.first_global_step)
        place = folder / run.stage
        fresh = not place.is_dir() or not any(place.iterdir())
        self._writer = _writer(place)
        if fresh:
            self._describe(run)

    @hookimpl
    def observer_step(self, step: int, metrics: Metrics) -> None:
        """The step's points."""
        if self._writer is None:
            return
        validated = any(name.startswith("val/") for name in metrics)
        if step % self.config.every and not validated:
            return
        at = int(metrics.get("global_step", step))
        for name, value in metrics.items():
            if name != "global_step":
                self._writer.add_scalar(name, value, at)
        self._writer.flush()

    @hookimpl
    def observer_samples(self, step: int, table: pa.Table) -> None:
        """The first rows of the step as a table of text."""
        due = self.config.samples and (step == 1 or step % self.config.samples_every == 0)
        if self._writer is None or not due:
            return
        at = int((table.schema.metadata or {}).get(GLOBAL_STEP, step))
        rows = table.slice(0, self.config.samples).select([n for n in _COLUMNS if n in table.column_names])
        self._writer.add_text("samples", markdown(rows, self.config.characters), at)
        self._writer.flush()

    @hookimpl
    def observer_run_end(self, outcome: Outcome) -> None:  # noqa: ARG002 (the hook's argument)
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _describe(self, run: RunInfo) -> None:
        """The configuration as text, and the stage's settings for the page of hyperparameters."""
        from torch.utils.tensorboard.summary import hparams

        assert self._writer is not None
        stage = run.config.get("stages", {}).get(run.stage, {})
        at = run.first_global_step or 0
        self._writer.add_text("config", _yaml(run.config), at)
        settings = dict(flat(stage)) | {"seed": run.config.get("seed", 0)}
        for summary in hparams(settings, dict.fromkeys(_measures(run.kind), 0)):
            cast(Any, self._writer.file_writer).add_summary(summary)
        self._writer.flush()


def _writer(folder: Path) -> SummaryWriter:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))


def _measures(kind: str) -> tuple[str, ...]:
    """What the runs of a kind are compared by."""
    return ("reward/mean", "kl", "val/accuracy") if kind == "rl" else ("loss", "val/accuracy")


def flat(value: Any, path: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """The scalars of nested data by dotted path; lists as text, what is null left out."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, bool | int | float | str):
        yield path, value
    elif value is not None:
        yield path, str(value)


def markdown(table: pa.Table, characters: int) -> str:
    """A table as markdown; long texts are cut, and bars and line breaks kept out of the way."""
    names = table.column_names
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for row in table.to_pylist():
        lines.append(f"| {' | '.join(_cell(row[name], characters) for name in names)} |")
    return "\n".join(lines)


def _cell(value: Any, characters: int) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    text = text if len(text) <= characters else text[:characters] + " …"
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\r", "").replace("\n", "<br>")


def _yaml(config: Mapping[str, Any]) -> str:
    from posttune.config.load import dump_yaml

    return "".join(f"    {line}\n" for line in dump_yaml(config).splitlines())
