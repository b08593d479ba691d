"""What ``posttune run`` says at its end: a table of the stages, and the reward's curve."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from posttune.cli.output import number, print_table
from posttune.config.models import RunConfig
from posttune.run.folder import RunFolder
from posttune.run.stages import StageResult

KEY_METRICS = {
    "convert": ("rows",),
    "sft": ("val/accuracy", "loss"),
    "reward_model": ("val/accuracy", "accuracy"),
    "rl": ("val/accuracy", "reward/mean"),
    "evaluate": ("accuracy",),
    "export": ("max_abs_logit_difference",),
}
"""The first of these that a stage reports is its key metric."""


def document(config: RunConfig, results: Sequence[StageResult], seconds: float) -> dict[str, Any]:
    """The JSON document of a finished run."""
    stages = [
        {
            "name": name,
            "kind": stage.kind,
            "seconds": result.seconds,
            "skipped": result.skipped,
            "steps": result.metrics.get("steps"),
            "output": result.output,
            "metrics": result.metrics,
        }
        for (name, stage), result in zip(config.stages.items(), results, strict=True)
    ]
    return {"run": config.output, "seconds": seconds, "stages": stages}


def show(config: RunConfig, results: Sequence[StageResult], seconds: float, plot: bool | None) -> None:
    """Print the table; and the curve of every rl stage, on a terminal or where ``plot`` asks for it."""
    pairs = list(zip(config.stages.items(), results, strict=True))
    rows: list[tuple[object, ...]] = [
        (name, stage.kind, f"{result.seconds:.1f}", key_metric(stage.kind, result))
        for (name, stage), result in pairs
    ]
    if plot or (plot is None and sys.stdout.isatty()):
        for name, stage in config.stages.items():
            if stage.kind == "rl":
                click.echo(curve(RunFolder(config.output).metrics, name), nl=False)
    print_table(["stage", "kind", "seconds", "key metric"], rows)
    click.echo(f"run folder: {config.output}; {seconds:.1f} s in all")


def key_metric(kind: str, result: StageResult) -> str:
    """``name: value`` of the metric that tells most of a stage, with its interval where it has one."""
    metrics = result.metrics
    name = next((name for name in KEY_METRICS.get(kind, ()) if metrics.get(name) is not None), None)
    note = " (done before)" if result.skipped else ""
    if name is None:
        return note.strip()
    interval = metrics.get("ci95")
    spread = ""
    if name == "accuracy" and isinstance(interval, Sequence) and len(interval) == 2:
        spread = f" (95 %: {number(float(interval[0]))} to {number(float(interval[1]))})"
    return f"{name}: {number(metrics[name])}{spread}{note}"


def curve(metrics: Path, stage: str) -> str:
    """The smoothed reward of an rl stage as text; empty where there are fewer than two steps."""
    points = read_metric(metrics, stage, "reward/mean")
    if len(points) < 2:
        return ""
    steps = list(points)
    return _plot(f"{stage}: reward/mean, smoothed", steps, smoothed(list(points.values())))


def read_metric(metrics: Path, stage: str, name: str) -> dict[int, float]:
    """A metric by step. A step that was taken twice (a resumed run) counts as it was taken last."""
    points: dict[int, float] = {}
    if not metrics.is_file():
        return points
    for line in metrics.read_text("utf-8").splitlines():
        row = _row(line)
        value = row.get(name)
        if row.get("stage") == stage and isinstance(value, int | float) and math.isfinite(value):
            points[int(row["step"])] = float(value)
    return dict(sorted(points.items()))


def smoothed(values: Sequence[float]) -> list[float]:
    """A centred mean over a tenth of the steps, at least three; narrower at both ends."""
    reach = max(1, len(values) // 20)
    windows = [values[max(0, index - reach) : index + reach + 1] for index in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _row(line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def _ticks(steps: Sequence[int]) -> list[int]:
    """About five whole steps from the first to the last."""
    first, last = steps[0], steps[-1]
    return sorted({first + round((last - first) * quarter / 4) for quarter in range(5)})


def _plot(title: str, steps: Sequence[int], values: Sequence[float]) -> str:
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(min(100, shutil.get_terminal_size((100, 24)).columns), 15)
    plotext.title(title)
    plotext.xlabel("step")
    plotext.xticks(_ticks(steps))
    plotext.plot(list(steps), list(values), marker="braille")
    text = plotext.uncolorize(plotext.build())
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
