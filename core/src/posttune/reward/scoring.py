"""What a score amounts to: one number of it, and its dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from posttune.types import Score

TOTAL = "total"
"""The dimension that, where a dict has it, is the score's value; the others are then only logged."""


def scalar(score: Score) -> float | None:
    """One number: the score itself, a dict's ``total``, or else the sum of its dimensions."""
    if score is None:
        return None
    if not isinstance(score, Mapping):
        return float(score)
    return float(score[TOTAL]) if TOTAL in score else float(sum(score.values()))


def scalars(scores: Sequence[Score]) -> list[float | None]:
    """`scalar` of each."""
    return [scalar(score) for score in scores]


def dimensions(label: str, score: Score) -> Iterator[tuple[str, float]]:
    """(``label``, number), or (``label/dimension``, number) for each dimension but the total."""
    if isinstance(score, Mapping):
        for name, value in score.items():
            if name != TOTAL:
                yield f"{label}/{name}", float(value)
    elif score is not None:
        yield label, float(score)
