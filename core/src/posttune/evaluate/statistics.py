"""What right and wrong answers say, and how sure it is. Importing this module imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z95 = 1.959963984540054  # of a normal distribution


def wilson(rate: float, n: int, z: float = Z95) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927): within 0..1, and sound where ``rate`` is 0 or 1."""
    if n < 1:
        raise ValueError("an interval needs at least one observation")
    centre = rate + z * z / (2 * n)
    spread = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that one of k answers drawn from n, ``correct`` of them right, is right.

    Unbiased: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, equation 1).
    """
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {correct} right answers in {n} is not defined")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def mean(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return math.fsum(values) / len(values) if values else None


def halvings(n: int) -> list[int]:
    """1, 2, 4 … below n, and n."""
    return [*(2**power for power in range(max(0, n - 1).bit_length())), n]
