"""Conversion against `datasets` (map(batched=True, num_proc=2)) on synthetic rows of GSM8K's length.

Usage: python benchmarks/data_convert.py [--rows 200000] [--tokenizer FOLDER] [--token-rows 20000]
Needs requirements-bench.txt. Each contender runs in a process of its own, from the source file to a data set
that can be memory-mapped. A few rows are converted before, so that imports are not timed; the memory is the
peak of all its processes together (proportional set size). Both do the same work: calculator annotations out,
final answer as reference, and with a tokenizer prompt and response encoded apart, joined, with an EOS and a
loss mask.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

PROCESSES = 2
_ANNOTATION = re.compile(r"<<[^<>\n]*>>")
_WORDS = [
    *("Natalia", "sold", "clips", "to", "her", "friends", "in", "April", "and", "then", "half", "as", "many"),
    *("apples", "each", "day", "for", "two", "more", "weeks", "how", "much", "money", "does", "he", "have"),
    *("left", "after", "buying", "three", "notebooks", "with", "the", "total", "cost", "of", "all", "eggs"),
]


def write_rows(path: Path, count: int) -> None:
    """``count`` rows: questions of about 235 characters and answers of about 290, as in GSM8K."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            question = " ".join(draw.choices(_WORDS, k=max(10, int(draw.gauss(48, 16)))))
            steps = [_step(draw) for _ in range(draw.randint(2, 5))]
            answer = "\n".join(steps) + f"\n#### {draw.randint(1, 2000):,}"
            file.write(json.dumps({"question": question, "answer": answer}) + "\n")


def _step(draw: random.Random) -> str:
    a, b = draw.randint(2, 99), draw.randint(2, 99)
    return f"{' '.join(draw.choices(_WORDS, k=9))} {a}*{b} = $<<{a}*{b}={a * b}>>{a * b}."


def with_posttune(source: Path, folder: Path, tokenizer: str | None) -> Callable[[], int]:
    """Our conversion."""
    from posttune.config.models import PluginRef
    from posttune.data.conversion import ConvertRequest, convert

    request = ConvertRequest(
        sources=[source],
        to=folder / "out",
        converter=PluginRef(name="gsm8k"),
        tokenizer=tokenizer,
        template="none",
        jobs=PROCESSES,
    )
    return lambda: convert(request).rows_out


def with_datasets(source: Path, folder: Path, tokenizer: str | None) -> Callable[[], int]:
    """The same with `datasets`."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    loaded = AutoTokenizer.from_pretrained(tokenizer) if tokenizer else None

    def run() -> int:
        data = datasets.load_dataset("json", data_files=str(source), cache_dir=str(folder), split="train")
        mapped = data.map(
            lambda batch: _batch(batch, loaded),
            batched=True,
            num_proc=PROCESSES,
            remove_columns=data.column_names,
        )
        return len(mapped)

    return run


def _batch(batch: dict[str, list[str]], tokenizer: Any) -> dict[str, list[Any]]:
    prompts = batch["question"]
    responses = [_ANNOTATION.sub("", answer) for answer in batch["answer"]]
    references = [answer.rpartition("####")[2].strip().replace(",", "") for answer in batch["answer"]]
    found: dict[str, list[Any]] = {"prompt": prompts, "response": responses, "reference": references}
    if tokenizer is not None:
        sides = [tokenizer(texts, add_special_tokens=False)["input_ids"] for texts in (prompts, responses)]
        pairs = [
            (prompt, [*response, tokenizer.eos_token_id]) for prompt, response in zip(*sides, strict=True)
        ]
        found["prompt_ids"] = [prompt for prompt, _ in pairs]
        found["input_ids"] = [prompt + response for prompt, response in pairs]
        found["loss_mask"] = [[False] * len(prompt) + [True] * len(response) for prompt, response in pairs]
    return found


CONTENDERS = {"posttune": with_posttune, "datasets": with_datasets}


def _child(name: str, source: Path, folder: Path, tokenizer: str | None, pipe: Any) -> None:
    few = folder / "few.jsonl"
    with source.open(encoding="utf-8") as lines, few.open("w", encoding="utf-8") as file:
        file.writelines(line for line, _ in zip(lines, range(10), strict=False))
    CONTENDERS[name](few, folder / "few", tokenizer)()  # what is imported and loaded once is not timed
    run = CONTENDERS[name](source, folder / "all", tokenizer)
    pipe.send("ready")
    began = time.perf_counter()
    rows = run()
    pipe.send((rows, time.perf_counter() - began))


def measure(name: str, source: Path, tokenizer: str | None) -> dict[str, float]:
    """Rows a second and peak memory (MiB) of one contender."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_child, args=(name, source, Path(folder), tokenizer, theirs))
        process.start()
        ours.recv()
        peak = 0.0
        while not ours.poll(0.05):
            peak = max(peak, _memory(process.pid))
        rows, seconds = ours.recv()
        process.join()
    return {
        "rows": rows,
        "seconds": round(seconds, 2),
        "rows_per_s": round(rows / seconds),
        "peak_mb": round(peak),
    }


def _memory(pid: int | None) -> float:
    total = 0.0
    try:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            total += process.memory_full_info().pss
    except psutil.NoSuchProcess:
        return total / 2**20
    return total / 2**20


def main() -> None:
    """Print one JSON object a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--token-rows", type=int, default=20_000)
    parser.add_argument("--tokenizer", help="folder; without one only the first comparison is made")
    arguments = parser.parse_args()
    os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    for tokenizer, count in ((None, arguments.rows), (arguments.tokenizer, arguments.token_rows)):
        if count and (tokenizer is not None or count == arguments.rows):
            with tempfile.TemporaryDirectory() as folder:
                source = Path(folder, "rows.jsonl")
                write_rows(source, count)
                found = {name: measure(name, source, tokenizer) for name in CONTENDERS}
            ratio = {
                "speed": round(found["posttune"]["rows_per_s"] / found["datasets"]["rows_per_s"], 2),
                "memory": round(found["posttune"]["peak_mb"] / found["datasets"]["peak_mb"], 2),
            }
            load = round(os.getloadavg()[0], 1)
            print(json.dumps({"tokenizer": tokenizer, **found, "ratio": ratio, "load": load}), flush=True)


if __name__ == "__main__":
    main()
