"""Which rows a step uses, as a pure function of the position in the stream of all rows ever drawn.

There is no sampler state: a checkpoint holds one integer, and a run resumes at any world size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # Sorting raw bits, not Generator.permutation: only the bit stream is stable over numpy's versions.
    bits = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(size)
    return np.argsort(bits, kind="stable")


@dataclass(frozen=True)
class PositionSampler:
    """Rows by global position: position ``p`` lies in epoch ``p // size``, each with an order of its own.

    ``seed`` is a non-negative integer. Without ``shuffle`` every epoch is 0, 1, … ``size - 1``.
    """

    size: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a sampler needs at least one row, got size {self.size}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"the seed must be between 0 and 2**64 - 1, got {self.seed}")

    def indices(self, position: int, count: int) -> list[int]:
        """Row indices of ``count`` draws from ``position`` on; wraps into the following epochs."""
        if position < 0 or count < 0:
            raise ValueError(f"position and count must not be negative, got {position} and {count}")
        rows: list[int] = []
        while len(rows) < count:
            epoch, offset = divmod(position + len(rows), self.size)
            end = min(self.size, offset + count - len(rows))
            rows.extend(self._epoch(epoch, offset, end))
        return rows

    def epoch(self, position: int) -> int:
        """The epoch that a position lies in, from 0."""
        return position // self.size

    def _epoch(self, epoch: int, start: int, end: int) -> list[int]:
        if not self.shuffle:
            return list(range(start, end))
        rows: list[int] = _permutation(self.size, self.seed, epoch)[start:end].tolist()
        return rows
