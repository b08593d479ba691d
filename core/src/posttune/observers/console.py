"""One line a step, and a progress bar where there is a terminal."""

from __future__ import annotations

import sys
from shlex import quote
from typing import TYPE_CHECKING, Any

from pydantic import Field

from posttune.config.models import Positive, Strict
from posttune.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rich.progress import Progress, TaskID

    from posttune.types import Metrics, Outcome, RunInfo

_ALGORITHMS = {
    "gae": "PPO",
    "dr_grpo": "Dr.GRPO",
    "reinforce_plus_plus": "REINFORCE++",
    "reinforce_plus_plus_baseline": "REINFORCE++-baseline",
}
_SHOWN = {
    "kl": "kl: {:.3g}",
    "loss": "loss: {:.4f}",
    "loss/policy": "loss: {:.4f}",
    "grad_norm": "grad_norm: {:.3f}",
    "tokens/completion": "tokens: {:.1f}",
}


class ConsoleConfig(Strict):
    """How often."""

    every: Positive = Field(1, description="Steps between lines; the last step always has one.")


class ConsoleObserver:
    """Writes ``GRPO step 12/80, reward: 0.872 ± 0.041, ...`` to the standard output.

    On a terminal a progress bar stays below the lines; in a pipe or a file there are the lines alone.
    """

    Config = ConsoleConfig

    def __init__(self, config: ConsoleConfig) -> None:
        self.config = config
        self._name = ""
        self._total: int | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    @hookimpl
    def observer_run_start(self, run: RunInfo) -> None:
        """Name the algorithm and open the bar."""
        self._name, self._total = algorithm_name(run), run.total_steps
        if run.total_steps and sys.stdout.isatty():
            self._progress = _bar()
            self._task = self._progress.add_task(self._name, total=run.total_steps, completed=run.first_step)
            self._progress.start()

    @hookimpl
    def observer_step(self, step: int, metrics: Metrics) -> None:
        """One line."""
        shown = step % self.config.every == 0 or step == self._total
        if shown or any(name.startswith("val/") for name in metrics):
            self._write(step_line(self._name, step, self._total, metrics))
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step)

    @hookimpl
    def observer_checkpoint(self, path: Path) -> None:
        """Say where it is, and how a model is made of it: beside the lines of steps, on the error output."""
        line = f"checkpoint: {path}; a model of it: posttune export {quote(str(path))} --to DIR"
        if self._progress is not None:
            self._write(line)
        else:
            sys.stderr.write(line + "\n")

    @hookimpl
    def observer_run_end(self, outcome: Outcome) -> None:  # noqa: ARG002 (the hook's argument)
        """Close the bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _write(self, line: str) -> None:
        if self._progress is not None:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


def step_line(name: str, step: int, total: int | None, metrics: Metrics) -> str:
    """The line of a step, such as ``SFT step 3/200, loss: 2.1000, ...``."""
    parts = [f"{name} step {step}/{total}" if total else f"{name} step {step}"]
    if "reward/mean" in metrics:
        parts.append(f"reward: {metrics['reward/mean']:.3f} ± {metrics.get('reward/std', 0.0):.3f}")
    parts += [shape.format(metrics[key]) for key, shape in _SHOWN.items() if key in metrics]
    parts += [f"{key}: {value:.4g}" for key, value in metrics.items() if key.startswith("val/")]
    if metrics.get("update/nonfinite_steps"):
        parts.append(f"not finite: {metrics['update/nonfinite_steps']:.0f}")
    if "lr" in metrics:
        parts.append(f"lr: {metrics['lr']:.2e}")
    if "tokens_per_s" in metrics:
        parts.append(f"{metrics['tokens_per_s']:,.0f} tokens/s")
    return ", ".join(parts)


def algorithm_name(run: RunInfo) -> str:
    """``SFT``, or the name of the advantage estimator as the literature writes it."""
    if run.kind != "rl":
        return run.kind.upper()
    stage: Mapping[str, Any] = run.config.get("stages", {}).get(run.stage, {})
    name = str(stage.get("advantage", {}).get("name", "rl"))
    return _ALGORITHMS.get(name, name.upper())


def _bar() -> Progress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
