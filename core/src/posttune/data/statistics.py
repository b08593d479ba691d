"""What ``meta.json`` says about a dataset, gathered batch by batch: 8 bytes a row, for the duplicates."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PARTS = ("prompt", "response", "total")


@dataclass
class Tally:
    """Counts over some rows. Those of two stretches of rows add up."""

    rows: int = 0
    warnings: Counter[str] = field(default_factory=Counter)
    columns: Counter[str] = field(default_factory=Counter)  # rows with a value
    lengths: dict[str, Counter[int]] = field(default_factory=lambda: {part: Counter() for part in PARTS})
    digests: Duplicates = field(default_factory=lambda: Duplicates())
    cut_rows: int = 0
    cut_tokens: int = 0

    def update(self, other: Tally) -> None:
        """Add the counts of the rows that follow."""
        self.rows += other.rows
        self.warnings.update(other.warnings)
        self.columns.update(other.columns)
        for part in PARTS:
            self.lengths[part].update(other.lengths[part])
        self.digests.extend(other.digests)
        self.cut_rows += other.cut_rows
        self.cut_tokens += other.cut_tokens


def summarise(counts: Counter[int]) -> dict[str, Any]:
    """Extremes, mean, percentiles, and a histogram: bin i counts edges[i - 1] < length <= edges[i]."""
    if not counts:
        return {}
    values = np.array(sorted(counts))
    numbers = np.array([counts[value] for value in values.tolist()])
    ends = numbers.cumsum()
    total = int(ends[-1])
    edges = [2**power for power in range(int(values[-1]).bit_length() + 1)]
    bins = np.bincount(np.searchsorted(edges, values), weights=numbers, minlength=len(edges))
    return {
        "min": int(values[0]),
        "max": int(values[-1]),
        "mean": round(float((values * numbers).sum() / total), 3),
        **{f"p{p}": int(values[np.searchsorted(ends, total * p / 100)]) for p in (50, 90, 95, 99)},
        "sum": int((values * numbers).sum()),
        "histogram": {"edges": edges, "counts": [int(count) for count in bins[: len(edges)]]},
    }


class Duplicates:
    """Counts equal rows by a 64-bit digest: 8 bytes a row.

    Digests are Python's own hashes: they mean something in this process and those forked from it.
    """

    def __init__(self) -> None:
        self._digests = array("q")

    def add(self, *texts: str | None) -> None:
        """Count one row."""
        self._digests.append(hash(texts))

    def add_all(self, rows: Iterable[tuple[str | None, ...]]) -> None:
        """Count rows."""
        self._digests.extend(map(hash, rows))

    def extend(self, other: Duplicates) -> None:
        """Count the rows of another one too."""
        self._digests.extend(other._digests)

    def count(self) -> int:
        """How many rows are equal to an earlier one."""
        digests = self.digests()
        return len(digests) - len(np.unique(digests))

    def digests(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """One digest a row, in order."""
        return np.array(self._digests, dtype=np.int64)
