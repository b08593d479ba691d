"""What ``meta.json`` says about a dataset, gathered batch by batch: 8 bytes a row, for the duplicates."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.int64]]

_LONG = 1 << 15
PARTS = ("prompt", "response", "total")


@dataclass
class Tally:
    """Counts over some rows. Those of two stretches of rows add up."""

    rows: int = 0
    warnings: Counter[str] = field(default_factory=Counter)
    columns: Counter[str] = field(default_factory=Counter)  # rows with a value
    lengths: dict[str, Lengths] = field(default_factory=lambda: {part: Lengths() for part in PARTS})
    digests: Duplicates = field(default_factory=lambda: Duplicates())
    cut_rows: int = 0
    cut_tokens: int = 0

    def update(self, other: Tally) -> None:
        """Add the counts of the rows that follow."""
        self.rows += other.rows
        self.warnings.update(other.warnings)
        self.columns.update(other.columns)
        for part in PARTS:
            self.lengths[part].extend(other.lengths[part])
        self.digests.extend(other.digests)
        self.cut_rows += other.cut_rows
        self.cut_tokens += other.cut_tokens


class Lengths:
    """How often each length occurred: short ones in an array, the few long ones by value."""

    def __init__(self) -> None:
        self._short = np.zeros(0, np.int64)
        self._long: Counter[int] = Counter()

    def update(self, lengths: Sequence[int] | Array) -> None:
        """Count lengths."""
        values = np.asarray(lengths, np.int64)
        short = values < _LONG
        if not short.all():
            self._long.update(values[~short].tolist())
            values = values[short]
        self._short = _sum(self._short, np.bincount(values))

    def extend(self, other: Lengths) -> None:
        """Count those of another one too."""
        self._short = _sum(self._short, other._short)
        self._long.update(other._long)

    def summary(self) -> dict[str, Any]:
        """Extremes, mean, percentiles, and a histogram: bin i counts edges[i - 1] < length <= edges[i]."""
        short, long = np.flatnonzero(self._short), sorted(self._long)
        values = np.array([*short, *long], dtype=np.int64)
        numbers = np.array([*self._short[short], *(self._long[value] for value in long)], dtype=np.int64)
        return _summarise(values, numbers) if len(values) else {}


def _sum(one: Array, other: Array) -> Array:
    longer, shorter = (one, other) if len(one) > len(other) else (other, one)
    found = longer.astype(np.int64)
    found[: len(shorter)] += shorter
    return found


def _summarise(values: Array, numbers: Array) -> dict[str, Any]:
    """For ``values`` in ascending order, each as often as ``numbers`` says."""
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
        digests = np.sort(self.digests())
        return int(np.count_nonzero(digests[1:] == digests[:-1]))

    def digests(self) -> Array:
        """One digest a row, in order."""
        return np.array(self._digests, dtype=np.int64)
