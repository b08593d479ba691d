"""Whether algorithms learn: their recipes on the quickstart's task, several seeds each, in one picture.

A model is taught the form of the task by SFT, once. Every recipe then begins with it. The script fails
where a run does not raise its mean reward.

Usage: python benchmarks/learning.py [--algorithms NAME ...] [--seeds N ...] [--steps N] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[1]
ALGORITHMS = ("ppo", "grpo", "rloo", "reinforce_plus_plus")
SFT_STAGES = ("train", "dev", "prompts", "sft")
EDGE = 0.2  # the first and the last part of a run whose means are compared
WINDOW = 9  # steps of the moving mean in the picture


@dataclass(frozen=True)
class Run:
    """One run of a recipe, by its metrics."""

    algorithm: str
    seed: int
    lines: Sequence[Mapping[str, Any]]

    def series(self, metric: str) -> list[tuple[int, float]]:
        """Step and value wherever the metric was measured."""
        return [(line["step"], line[metric]) for line in self.lines if metric in line]

    def ends(self) -> tuple[float, float]:
        """Mean reward over the first and the last steps."""
        values = [value for _, value in self.series("reward/mean")]
        count = max(1, round(EDGE * len(values)))
        return fmean(values[:count]), fmean(values[-count:])


def posttune(config: Path, *overrides: str) -> None:
    """Run a configuration; its messages are shown where it fails."""
    command = [
        sys.executable,
        "-m",
        "posttune",
        "run",
        str(config),
        "--no-plot",
        "--json",
        "--resume",
        *overrides,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")


def teach(folder: Path, overrides: Sequence[str]) -> Path:
    """The quickstart up to its SFT stage; its run folder."""
    from posttune.config.document import read_document
    from posttune.config.load import dump_yaml

    base = folder / "base"
    if not (base / "models" / "sft").is_dir():
        data = folder / "data"
        subprocess.run([sys.executable, ROOT / "configs/quickstart/make_data.py", data], check=True)
        plain = read_document(ROOT / "configs/quickstart.yaml").data
        plain["stages"] = {name: plain["stages"][name] for name in SFT_STAGES}
        for name in SFT_STAGES[:3]:
            plain["stages"][name] |= {"kind": "convert", "source": str(data / f"{name}.jsonl")}
        config = folder / "base.yaml"
        config.write_text(dump_yaml(plain), encoding="utf-8")
        posttune(config, f"output={base}", *overrides)
    return base


def learn(algorithm: str, seed: int, base: Path, folder: Path, overrides: Sequence[str]) -> Run:
    """Run a recipe from the taught model."""
    output = folder / f"{algorithm}-{seed}"
    if not (output / "stages" / "export.json").is_file():
        places = [f"rl.model={base}/models/sft", f"rl.data={base}/data/prompts"]
        places += [f"rl.evaluate.data={base}/data/dev", f"output={output}", f"seed={seed}"]
        posttune(ROOT / f"configs/{algorithm}.yaml", *places, *overrides)
    text = (output / "metrics.jsonl").read_text(encoding="utf-8")
    return Run(algorithm, seed, [json.loads(line) for line in text.splitlines()])


def report(runs: Sequence[Run]) -> bool:
    """Print a line a run; whether every run raised its reward."""
    print(f"{'algorithm':<22} seed   reward first  last     accuracy first  last")
    for run in runs:
        first, last = run.ends()
        accuracy = [value for _, value in run.series("val/accuracy")] or [float("nan")]
        print(
            f"{run.algorithm:<22} {run.seed:>4}   {first:>12.3f} {last:>5.3f}"
            f"   {accuracy[0]:>14.3f} {accuracy[-1]:>5.3f}"
        )
    return all(last > first for first, last in (run.ends() for run in runs))


def smooth(series: Sequence[tuple[int, float]]) -> Iterator[tuple[int, float]]:
    """The moving mean of what came before."""
    for place, (step, _) in enumerate(series):
        yield step, fmean(value for _, value in series[max(0, place + 1 - WINDOW) : place + 1])


def draw(runs: Sequence[Run], path: Path) -> None:
    """Reward (smoothed) and greedy accuracy of every run, a panel an algorithm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(run.algorithm for run in runs))
    figure, axes = pyplot.subplots(
        1, len(names), figsize=(3.6 * len(names), 3.4), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes[0], names, strict=True):
        for run in (each for each in runs if each.algorithm == name):
            color = f"C{run.seed}"
            axis.plot(
                *zip(*smooth(run.series("reward/mean")), strict=True), color=color, label=f"seed {run.seed}"
            )
            axis.plot(*zip(*run.series("val/accuracy"), strict=True), "o", color=color, markersize=4)
        axis.set(title=name, xlabel="step", ylim=(0, 1))
    axes[0][0].set_ylabel("reward (line), greedy accuracy (dots)")
    axes[0][-1].legend(frameon=False)
    figure.savefig(path, dpi=150)
    print(path)


def main() -> None:
    """Teach, learn, report and draw."""
    parser = argparse.ArgumentParser(description="Compare how algorithms learn.")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs/learning", help="what is done there is kept"
    )
    parser.add_argument("--plot", type=Path, help="a PNG; needs requirements-bench.txt")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--sft", nargs="*", default=[], metavar="OVERRIDE", help="such as sft.steps=50")
    parser.add_argument("--rl", nargs="*", default=[], metavar="OVERRIDE", help="such as rl.batch.prompts=16")
    asked = parser.parse_args()
    folder = asked.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    base = teach(folder, asked.sft)
    overrides = [f"rl.steps={asked.steps}", *asked.rl]
    with ThreadPoolExecutor(asked.jobs) as pool:
        wanted = [(name, seed) for name in asked.algorithms for seed in asked.seeds]
        runs = list(pool.map(lambda each: learn(each[0], each[1], base, folder, overrides), wanted))
    risen = report(runs)
    if asked.plot:
        draw(runs, asked.plot)
    if not risen:
        sys.exit("a run did not raise its reward")


if __name__ == "__main__":
    main()
