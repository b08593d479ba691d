"""Two-digit addition as JSONL: rows that a model of this size cannot answer by memory alone.

Usage: python make_data.py FOLDER [--seed N]

Of the 10,000 pairs, 500 are kept for the test and 200 for validation during training; 4,000 of the
rest are the training rows of the SFT, and all of the rest are prompts of the RL stage.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path

TEST, DEV, TRAIN = 500, 200, 4000
Pair = tuple[int, int]


def split(seed: int) -> dict[str, list[Pair]]:
    """Pairs of each file; test and dev share none with the others."""
    pairs = [(left, right) for left in range(100) for right in range(100)]
    random.Random(seed).shuffle(pairs)
    rest = pairs[TEST + DEV :]
    return {"test": pairs[:TEST], "dev": pairs[TEST : TEST + DEV], "train": rest[:TRAIN], "prompts": rest}


def write(path: Path, pairs: Iterable[Pair]) -> None:
    """One row a pair, such as {"question": "38+47=", "answer": "85"}."""
    rows = [{"question": f"{left}+{right}=", "answer": str(left + right)} for left, right in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write the four files."""
    parser = argparse.ArgumentParser(description="Write the rows of the quickstart.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in split(arguments.seed).items():
        write(arguments.folder / f"{name}.jsonl", pairs)
        print(f"{arguments.folder / name}.jsonl: {len(pairs)} rows")


if __name__ == "__main__":
    main()
