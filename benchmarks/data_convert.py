"""Conversion against `datasets` on synthetic rows of GSM8K's length.

Usage: python benchmarks/data_convert.py [--rows 200000] [--token-rows 200000] [--tokenizer FOLDER]
[--repeats 3]. Needs requirements-bench.txt. Each contender runs in a process of its own, from the source
file to a folder that can be memory-mapped: the peer loads, maps (batched=True, num_proc=2) and saves.
`datasets_unsaved` leaves its result in the cache. A few rows are converted before, so that imports are not
timed. Memory is the peak of all processes together: `peak_mb` with shared pages by their share (proportional
set size, which also counts mapped files), `private_mb` without them. All do the same work: calculator
annotations out, final answer as reference, and with a tokenizer prompt and response encoded apart, joined,
with an EOS and a loss mask.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
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


def with_datasets(
    source: Path, folder: Path, tokenizer: str | None, *, save: bool = True
) -> Callable[[], int]:
    """The same with `datasets`; without ``save`` its result stays in the cache, where no path names it."""
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
        if save:
            mapped.save_to_disk(str(folder / "out"))
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


CONTENDERS: dict[str, Callable[[Path, Path, str | None], Callable[[], int]]] = {
    "posttune": with_posttune,
    "datasets": with_datasets,
    "datasets_unsaved": partial(with_datasets, save=False),
}
RATIOS = {"speed": "rows_per_s", "cpu": "cpu_s", "memory": "peak_mb", "private": "private_mb"}


def _child(name: str, source: Path, folder: Path, tokenizer: str | None, pipe: Any) -> None:
    few = folder / "few.jsonl"
    with source.open(encoding="utf-8") as lines, few.open("w", encoding="utf-8") as file:
        file.writelines(line for line, _ in zip(lines, range(10), strict=False))
    CONTENDERS[name](few, folder / "few", tokenizer)()  # what is imported and loaded once is not timed
    run = CONTENDERS[name](source, folder / "all", tokenizer)
    pipe.send("ready")
    began, busy = time.perf_counter(), _cpu()
    rows = run()
    pipe.send((rows, time.perf_counter() - began, _cpu() - busy))


def _cpu() -> float:
    """Seconds of processor time, of this process and those that it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measure(name: str, source: Path, tokenizer: str | None) -> dict[str, float]:
    """Rows a second, processor time and peak memory (MiB) of one contender."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_child, args=(name, source, Path(folder), tokenizer, theirs))
        process.start()
        ours.recv()
        peak = private = 0.0
        while not ours.poll(0.05):
            now = _memory(process.pid)
            peak, private = max(peak, now[0]), max(private, now[1])
        rows, seconds, busy = ours.recv()
        process.join()
    return {
        "rows": rows,
        "seconds": seconds,
        "cpu_s": busy,
        "rows_per_s": rows / seconds,
        "peak_mb": peak,
        "private_mb": private,
    }


def compare(source: Path, tokenizer: str | None, repeats: int) -> dict[str, Any]:
    """Medians of both contenders, which take turns, and of the ratios within each turn."""
    turns = [
        {name: _shown(name, measure(name, source, tokenizer)) for name in CONTENDERS} for _ in range(repeats)
    ]
    found: dict[str, Any] = {
        name: {key: round(median(turn[name][key] for turn in turns), 2) for key in turns[0][name]}
        for name in CONTENDERS
    }
    for peer in ("datasets", "datasets_unsaved"):
        found[peer]["ratio"] = {
            name: round(median(turn["posttune"][key] / turn[peer][key] for turn in turns), 2)
            for name, key in RATIOS.items()
        }
    return found


def _shown(name: str, found: dict[str, float]) -> dict[str, float]:
    rounded = {key: round(value, 2) for key, value in found.items()}
    print(name, json.dumps(rounded), file=sys.stderr, flush=True)
    return found


def _memory(pid: int | None) -> tuple[float, float]:
    """MiB of a process and those below it: shared pages by their share, and private pages only."""
    shared = private = 0.0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                found = process.memory_full_info()
                shared, private = shared + found.pss / 2**20, private + found.uss / 2**20
    return shared, private


def main() -> None:
    """Print one JSON object a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--token-rows", type=int, default=200_000)
    parser.add_argument("--tokenizer", help="folder; without one only the first comparison is made")
    parser.add_argument("--repeats", type=int, default=3, help="turns that both take, one after the other")
    arguments = parser.parse_args()
    os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    comparisons = [(None, arguments.rows)]
    if arguments.tokenizer is not None:
        comparisons.append((arguments.tokenizer, arguments.token_rows))
    for tokenizer, count in comparisons:
        if not count:
            continue
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "rows.jsonl")
            write_rows(source, count)
            found = compare(source, tokenizer, arguments.repeats)
        load = round(os.getloadavg()[0], 1)
        print(json.dumps({"tokenizer": tokenizer, **found, "load": load}), flush=True)


if __name__ == "__main__":
    main()
