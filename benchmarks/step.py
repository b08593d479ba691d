"""Speed and padding of an RL step on the quickstart's model, from the metrics of a short run.

Usage: python benchmarks/step.py [--steps N] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SKIPPED_STEPS = 2  # the first steps warm up
METRICS = (
    "time/step_s",
    "time/rollout_s",
    "time/reward_s",
    "time/update_s",
    "time/sync_s",
    "tokens_per_s",
    "tokens/completion",
    "update/padding_fraction",
    "update/tokens_per_row",
    "update/attention_waste",
    "memory/peak_mb",
)


def run(folder: Path, steps: int) -> Path:
    """A short quickstart in ``folder``; its metrics."""
    data = folder / "data"
    subprocess.run([sys.executable, ROOT / "configs/quickstart/make_data.py", data], check=True)
    sources = [f"{name}.source={data / name}.jsonl" for name in ("train", "dev", "prompts", "test")]
    overrides = [f"output={folder / 'run'}", *sources, "sft.steps=50", f"grpo.steps={steps + SKIPPED_STEPS}"]
    command = [sys.executable, "-m", "posttune", "run", "configs/quickstart.yaml", "--no-plot", *overrides]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder / "run" / "metrics.jsonl"


def report(path: Path) -> None:
    """Print the median of each metric over the RL steps after the warm-up."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [line for line in lines if line["stage"] == "grpo" and "time/step_s" in line][SKIPPED_STEPS:]
    print(f"{len(rows)} RL steps of the quickstart")
    for name in METRICS:
        values = [row[name] for row in rows if name in row]
        if values:
            low, middle, high = min(values), statistics.median(values), max(values)
            print(f"{name:<26} median {middle:>12.5g}   from {low:.5g} to {high:.5g}")


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description="Measure RL steps.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.folder:
        report(run(arguments.folder, arguments.steps))
        return
    with tempfile.TemporaryDirectory() as folder:
        report(run(Path(folder), arguments.steps))


if __name__ == "__main__":
    main()
