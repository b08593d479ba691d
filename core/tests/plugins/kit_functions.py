"""A reward and a manager that are given by their path."""

from __future__ import annotations


def score(response: str) -> float:
    return float(len(response.split()))


class Combine:
    def combine(self, samples: list[object], scores: dict[str, list[float | None]]) -> list[float | None]:
        rows = [[column[at] for column in scores.values()] for at in range(len(samples))]
        return [None if None in row else sum(each for each in row if each is not None) for row in rows]
