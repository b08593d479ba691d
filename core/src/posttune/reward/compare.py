"""Where two ways of judging the same answers disagree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EQUAL = 1e-9


@dataclass(frozen=True)
class Disagreement:
    """A sample on which they differ; None: that one could not score it."""

    sample: int  # position
    first: float | None
    second: float | None

    @property
    def distance(self) -> float:
        """How far apart; a sample that only one could score comes before all others."""
        if self.first is None or self.second is None:
            return float("inf")
        return abs(self.first - self.second)


@dataclass(frozen=True)
class Comparison:
    """Two columns of scores against each other."""

    compared: int
    both_scored: int
    first_higher: int
    second_higher: int
    scored_by_one: int
    disagreements: tuple[Disagreement, ...]  # the largest first

    @property
    def differing(self) -> int:
        """Samples on which they differ."""
        return len(self.disagreements)


def compare(first: Sequence[float | None], second: Sequence[float | None]) -> Comparison:
    """Compare two columns of the same samples, in the same order."""
    pairs = [Disagreement(i, *pair) for i, pair in enumerate(zip(first, second, strict=True))]
    both = [pair for pair in pairs if pair.first is not None and pair.second is not None]
    one = [pair for pair in pairs if (pair.first is None) != (pair.second is None)]
    higher = [pair for pair in both if (pair.first or 0) - (pair.second or 0) > EQUAL]
    lower = [pair for pair in both if (pair.second or 0) - (pair.first or 0) > EQUAL]
    differing = sorted([*one, *higher, *lower], key=lambda pair: -pair.distance)
    return Comparison(len(pairs), len(both), len(higher), len(lower), len(one), tuple(differing))
