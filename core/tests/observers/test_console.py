"""Readable lines, in a pipe and on a terminal."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from posttune.observers.console import ConsoleConfig, ConsoleObserver, algorithm_name, step_line
from posttune.types import Outcome, RunInfo


def run_info(kind: str = "rl", advantage: str = "grpo", total: int | None = 80) -> RunInfo:
    stages = {"main": {"kind": kind, "advantage": {"name": advantage}}}
    return RunInfo(Path("run"), "run", "main", kind, total, 0, {"stages": stages})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("advantage", "name"),
    [
        ("grpo", "GRPO"),
        ("gae", "PPO"),
        ("rloo", "RLOO"),
        ("reinforce_plus_plus", "REINFORCE++"),
        ("mine", "MINE"),
    ],
)
def test_an_estimator_goes_by_the_name_of_its_algorithm(advantage: str, name: str) -> None:
    assert algorithm_name(run_info(advantage=advantage)) == name


def test_other_stages_go_by_their_kind() -> None:
    assert algorithm_name(run_info(kind="sft")) == "SFT"


def test_an_rl_line() -> None:
    metrics = {
        "reward/mean": 0.8721,
        "reward/std": 0.0412,
        "kl": 0.00012,
        "lr": 1e-4,
        "tokens_per_s": 15432.1,
    }
    line = step_line("GRPO", 12, 80, metrics)
    assert line == "GRPO step 12/80, reward: 0.872 ± 0.041, kl: 0.00012, lr: 1.00e-04, 15,432 tokens/s"


def test_an_sft_line_shows_the_loss_and_the_validation() -> None:
    line = step_line("SFT", 3, None, {"loss": 2.13456, "val/accuracy": 0.25, "update/nonfinite_steps": 1})
    assert line == "SFT step 3, loss: 2.1346, val/accuracy: 0.25, not finite: 1"


def test_in_a_pipe_there_are_plain_lines_alone(capsys: pytest.CaptureFixture[str]) -> None:
    observer = ConsoleObserver(ConsoleConfig(every=2))
    observer.observer_run_start(run=run_info(total=3))
    for step in (1, 2, 3):
        observer.observer_step(step=step, metrics={"reward/mean": 1.0})
    observer.observer_run_end(outcome=Outcome("main", "finished", 3))
    out, err = capsys.readouterr()
    assert out == "GRPO step 2/3, reward: 1.000 ± 0.000\nGRPO step 3/3, reward: 1.000 ± 0.000\n"
    assert err == ""


def test_each_save_names_the_command_that_exports_it(capsys: pytest.CaptureFixture[str]) -> None:
    observer = ConsoleObserver(ConsoleConfig())
    observer.observer_run_start(run=run_info(total=3))
    observer.observer_checkpoint(path=Path("my run/checkpoints/global_step_2"))
    out, err = capsys.readouterr()
    assert out == ""  # which has one line a step
    command = "posttune export 'my run/checkpoints/global_step_2' --to DIR"
    assert err == f"checkpoint: my run/checkpoints/global_step_2; a model of it: {command}\n"


def test_on_a_terminal_a_bar_stays_below_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    observer = ConsoleObserver(ConsoleConfig())
    observer.observer_run_start(run=run_info(total=2))
    observer.observer_step(step=1, metrics={"loss": 1.5})
    observer.observer_step(step=2, metrics={"loss": 1.25})
    observer.observer_run_end(outcome=Outcome("main", "finished", 2))
    shown = screen.getvalue()
    assert "GRPO step 1/2, loss: 1.5000" in shown
    assert "2/2" in shown
    assert "\x1b[?25h" in shown or "\x1b[?25l" not in shown  # the cursor is back
