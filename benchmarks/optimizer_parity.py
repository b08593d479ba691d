"""The loss with moments of 8 bits and bfloat16 weights, beside that of float32 AdamW on the same data.

    python benchmarks/optimizer_parity.py --steps 150 --batch 64   # the quickstart's model, CPU
    python benchmarks/optimizer_parity.py --model models/smollm2 --source data/gsm8k/train.jsonl \\
        --steps 60 --lr 1e-5 --device cuda --jobs 4 --json parity.json

Every variant is a run of its own. The last column is the mean difference of the loss from that of float32
AdamW, step by step over the last half; it should be small beside the fall of the loss.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from posttune.config.load import dump_yaml, load_config
from posttune.config.models import ModelConfig, SftStage

ROOT = Path(__file__).parents[1]
EXACT = "float32, adamw"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    EXACT: ("float32", {"name": "adamw"}),
    "float32, 8 bits": ("float32", {"name": "torchao_adamw_8bit"}),
    "bfloat16, adamw": ("bfloat16", {"name": "adamw"}),
    "bfloat16, rounded by chance": ("bfloat16", {"name": "torchao_adamw", "stochastic_rounding": True}),
    "bfloat16, 8 bits, rounded by chance": (
        "bfloat16",
        {"name": "torchao_adamw_8bit", "stochastic_rounding": True},
    ),
}


def stages(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The stage that converts the rows, and the model."""
    if options.model is None:
        make = [sys.executable, str(ROOT / "configs/quickstart/make_data.py"), str(folder)]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        roles = {"prompt": "question", "response": "answer"}
        convert = {"kind": "convert", "source": str(folder / "train.jsonl"), "map": roles}
        sft = load_config(ROOT / "configs/quickstart.yaml").config.stages["sft"]
        assert isinstance(sft, SftStage)
        assert isinstance(sft.model, ModelConfig)
        return convert, sft.model.model_dump(exclude_unset=True)
    model = str(Path(options.model).resolve())
    convert = {
        "kind": "convert",
        "source": str(Path(options.source).resolve()),
        "converter": {"name": "gsm8k"},
    }
    convert |= {"map": {"prompt": "question", "response": "answer"}, "tokenizer": model}
    return convert, {"path": model}


def losses(
    name: str, options: argparse.Namespace, given: tuple[dict[str, Any], Any], folder: Path
) -> list[float]:
    """Train one variant; its loss at every step."""
    dtype, optimizer = VARIANTS[name]
    convert, model = given
    optimizer = optimizer | {"lr": options.lr, "betas": [0.9, 0.95], "warmup_steps": options.steps // 10}
    sft = {
        "model": model | {"dtype": dtype},
        "data": "rows",
        "batch_size": options.batch,
        "steps": options.steps,
    }
    output = folder / name.replace(" ", "-").replace(",", "")
    run = {"output": str(output), "device": options.device, "observers": [{"name": "jsonl"}], "threads": 1}
    run["stages"] = {"rows": convert, "sft": sft | {"kind": "sft", "optimizer": optimizer}}
    path = output.with_suffix(".yaml")
    path.write_text(dump_yaml(run), encoding="utf-8")
    command = [sys.executable, "-m", "posttune", "run", str(path), "--no-plot"]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="a folder; without one the quickstart's model and rows")
    parser.add_argument("--source", help="the training file of GSM8K, with --model")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        given = stages(options, folder)
        with ThreadPoolExecutor(options.jobs) as pool:
            tasks = {name: pool.submit(losses, name, options, given, folder) for name in VARIANTS}
            found = {name: task.result() for name, task in tasks.items()}
    half, tenth = options.steps // 2, max(1, options.steps // 10)
    print(f"{'':>36} {'first':>8} {'last tenth':>11} {'difference':>11}")
    for name, values in found.items():
        gap = fmean(a - b for a, b in zip(values[half:], found[EXACT][half:], strict=True))
        print(f"{name:>36} {values[0]:>8.4f} {fmean(values[-tenth:]):>11.4f} {gap:>+11.5f}")
    if options.json:
        options.json.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
