"""What ``meta.json`` says about a dataset, gathered row by row in memory that does not grow with them."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from typing import Any

import numpy as np


class Lengths:
    """A histogram of lengths. Memory follows the number of different lengths."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, length: int) -> None:
        """Count one."""
        self._counts[length] += 1

    def summary(self) -> dict[str, Any]:
        """Extremes, mean, percentiles, and a histogram: bin i counts edges[i - 1] < length <= edges[i]."""
        if not self._counts:
            return {}
        values = np.array(sorted(self._counts))
        counts = np.array([self._counts[value] for value in values.tolist()])
        ends = counts.cumsum()
        total = int(ends[-1])
        edges = [2**power for power in range(int(values[-1]).bit_length() + 1)]
        bins = np.bincount(np.searchsorted(edges, values), weights=counts, minlength=len(edges))
        return {
            "min": int(values[0]),
            "max": int(values[-1]),
            "mean": round(float((values * counts).sum() / total), 3),
            **{f"p{p}": int(values[np.searchsorted(ends, total * p / 100)]) for p in (50, 90, 95, 99)},
            "sum": int((values * counts).sum()),
            "histogram": {"edges": edges, "counts": [int(count) for count in bins[: len(edges)]]},
        }


class Duplicates:
    """Counts equal rows by a 64-bit digest: 8 bytes a row."""

    def __init__(self) -> None:
        self._digests = array("Q")

    def add(self, *texts: str | None) -> None:
        """Count one row."""
        state = hashlib.blake2b(digest_size=8)
        for text in texts:
            data = b"" if text is None else text.encode("utf-8")
            state.update(len(data).to_bytes(8, "little"))  # so that ("ab", "c") is not ("a", "bc")
            state.update(data)
        self._digests.append(int.from_bytes(state.digest(), "little"))

    def count(self) -> int:
        """How many rows are equal to an earlier one."""
        digests = np.frombuffer(self._digests, dtype=np.uint64) if self._digests else np.zeros(0, np.uint64)
        return len(digests) - len(np.unique(digests))

    def digests(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """One digest a row, in order."""
        return np.array(self._digests, dtype=np.uint64)
