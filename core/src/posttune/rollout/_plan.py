"""Which rows of a generation run together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttune.types import Request


@dataclass(frozen=True)
class Limits:
    """The largest batch: its rows, and the bytes that it may take."""

    rows: int | None
    memory: int  # bytes
    per_token: int  # bytes of key-value cache
    per_row: int = 0  # bytes of logits

    def fitting(self, length: int) -> int:
        """Rows of ``length`` tokens that fit; at least one."""
        count = max(1, self.memory // (self.per_token * length + self.per_row))
        return min(count, self.rows) if self.rows is not None else count


@dataclass(frozen=True)
class Span:
    """Samples ``first .. first + count - 1`` of the request at ``position``; one prefill serves them all."""

    position: int
    first: int
    count: int


def plan(requests: Sequence[Request], n: int, new_tokens: int, limits: Limits) -> list[list[Span]]:
    """Batches of spans, longest prompts first, so that what would not fit fails at the start.

    Prompts of like length share a batch: little padding. A batch holds at least one row, whatever the limits.
    """
    order = sorted(range(len(requests)), key=lambda i: (-len(requests[i].prompt_ids), i))
    batches: list[list[Span]] = []
    free = 0
    for position in order:
        first = 0
        while first < n:
            if free <= 0:
                batches.append([])
                free = limits.fitting(len(requests[position].prompt_ids) + new_tokens)
            count = min(free, n - first)
            batches[-1].append(Span(position, first, count))
            first += count
            free -= count
    return batches
