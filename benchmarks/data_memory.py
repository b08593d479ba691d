"""Peak memory of a training process over datasets of more and more rows: it should stay flat.

Usage: python benchmarks/data_memory.py [--rows 10000 100000 1000000] [--tokenizer FOLDER] [--steps 20]
Rows have GSM8K's length. Each dataset is converted by one process and an SFT stage of a tiny new model is
run on it by another, shuffled over all rows. `trainer_mb` is the peak resident set of the latter, which
counts the pages of the memory-mapped data that it touched; `trainer_own_mb` is without files; `convert_mb` is
that of the conversion (its main process).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from data_convert import write_rows

MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def peaks(*words: str) -> tuple[float, float]:
    """Peaks of ``posttune WORDS``, MiB: the resident set, and what of it is of no file (looked at often)."""
    command = [sys.executable, "-m", "posttune", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    own = 0.0
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        own = max(own, _anonymous(process.pid))
        time.sleep(0.05)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return usage.ru_maxrss / 1024, own


def _anonymous(pid: int) -> float:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0  # a process that has just ended has none


def measure(rows: int, tokenizer: str, steps: int, folder: Path) -> dict[str, float]:
    """Both peaks for a dataset of so many rows."""
    write_rows(folder / "rows.jsonl", rows)
    data = str(folder / "data")
    words = ("--to", data, "--converter", "gsm8k", "--tokenizer", tokenizer, "--template", "none")
    convert, _ = peaks("data", "convert", str(folder / "rows.jsonl"), *words)
    stage = {
        "model": {"init": MODEL, "tokenizer": tokenizer},
        "data": data,
        "batch_size": 32,
        "steps": steps,
        "packing": {"micro_batch_tokens": 2048},  # else the logits are most of what is measured
    }
    config = {"output": str(folder / "run"), "device": "cpu", "threads": 1, "stages": {"sft": stage}}
    (folder / "run.yaml").write_text(json.dumps(config))  # JSON is YAML
    trainer, own = peaks("run", str(folder / "run.yaml"), "--no-plot")
    size = sum(path.stat().st_size for path in Path(data).iterdir()) / 2**20
    found = {"convert_mb": convert, "trainer_mb": trainer, "trainer_own_mb": own}
    return {"rows": rows, "dataset_mb": size, **found}


def main() -> None:
    """Print one JSON object a size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--tokenizer", default="bytes", help='folder, or "bytes"')
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    for rows in arguments.rows:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(rows, arguments.tokenizer, arguments.steps, Path(folder))
        print(json.dumps({key: round(value) for key, value in found.items()}), flush=True)


if __name__ == "__main__":
    main()
