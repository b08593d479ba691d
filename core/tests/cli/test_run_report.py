"""The end of a run: the table's key metric and the curve."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from posttune.cli.run_report import curve, key_metric, read_metric, smoothed
from posttune.run.stages import StageResult


def result(skipped: bool = False, **metrics: object) -> StageResult:
    return StageResult(None, {key.replace("__", "/"): value for key, value in metrics.items()}, 1.0, skipped)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def step(number: int, value: object, stage: str = "rl") -> dict[str, object]:
    return {"stage": stage, "step": number, "reward/mean": value}


@pytest.mark.parametrize(
    ("kind", "found", "text"),
    [
        ("sft", result(loss=1.23456, val__accuracy=0.5), "val/accuracy: 0.5"),
        ("sft", result(loss=1.23456), "loss: 1.235"),
        ("rl", result(reward__mean=0.25), "reward/mean: 0.25"),
        ("evaluate", result(accuracy=0.5, ci95=[0.4, 0.6]), "accuracy: 0.5 (95 %: 0.4 to 0.6)"),
        ("convert", result(rows=7473), "rows: 7,473"),
        ("convert", result(skipped=True, rows=1), "rows: 1 (done before)"),
        ("export", result(), ""),
        ("export", result(skipped=True), "(done before)"),
    ],
)
def test_the_key_metric(kind: str, found: StageResult, text: str) -> None:
    assert key_metric(kind, found) == text


def test_a_metric_is_read_by_step_and_the_last_writing_counts(tmp_path: Path) -> None:
    rows = [step(1, 0.1), step(2, 0.2), step(1, 9, "sft"), step(2, 0.3), step(3, None), {"stage": "rl"}, 3]
    path = write(tmp_path / "metrics.jsonl", *rows)
    with path.open("a") as file:
        file.write('{"stage": "rl", "st')  # a line that a killed process left
    assert read_metric(path, "rl", "reward/mean") == {1: 0.1, 2: 0.3}
    assert read_metric(tmp_path / "none", "rl", "reward/mean") == {}


def test_smoothing_keeps_length_and_constant_values() -> None:
    assert smoothed([2.0] * 50) == [2.0] * 50
    assert smoothed([0.0, 3.0]) == [1.5, 1.5]
    assert smoothed([1.0]) == [1.0]
    noisy = [float(n % 2) for n in range(100)]
    assert all(abs(value - 0.5) < 0.1 for value in smoothed(noisy)[5:-5])


def test_the_curve_is_text_without_colours(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", *(step(n, n / 80) for n in range(1, 81)))
    text = curve(path, "rl")
    assert "rl: reward/mean, smoothed" in text
    assert "\x1b" not in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_one_step_makes_no_curve(tmp_path: Path) -> None:
    assert curve(write(tmp_path / "metrics.jsonl", step(1, 1.0)), "rl") == ""
    assert curve(tmp_path / "none", "rl") == ""


def test_a_pipe_that_knows_no_unicode_is_no_crash(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", *(step(n, n) for n in range(1, 9)))
    script = (
        "import sys; sys.stdout.reconfigure(encoding='ascii');"
        "from posttune.cli.main import main; main(['version']);"
        "from posttune.cli.run_report import curve; import click; from pathlib import Path;"
        f"click.echo(curve(Path({str(tmp_path / 'metrics.jsonl')!r}), 'rl'))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "smoothed" in done.stdout
