"""Filling rows with sequences, and sharing work out evenly. Plain integers; no tensors.

Rows are filled as in first-fit decreasing, but each row's remainder is filled by an exact bounded
subset sum, and on a histogram of lengths, so that a pattern found once serves all its repeats.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

Pattern = tuple[int, ...]  # the lengths that share one row

PADDING_GOAL = 0.01  # share of computed tokens; rows get no longer than this needs
_CANDIDATES = 24
_NEAR = 6


@dataclass(frozen=True)
class Filling:
    """Rows of one capacity: each pattern with the number of rows that follow it."""

    patterns: tuple[tuple[Pattern, int], ...]
    padding: float  # share of rows x longest row that holds no token
    row_length: int  # longest row that occurs

    @property
    def rows(self) -> int:
        return sum(times for _, times in self.patterns)


def row_length_for(lengths: Sequence[int], limit: int, budget: int | None = None) -> int:
    """The shortest row within ``limit`` that wastes at most ``PADDING_GOAL``; else the least wasteful.

    Short rows matter where attention inside a packed row is dense: its cost grows with their square.
    ``limit`` is at least the longest length. Where ``budget`` tokens make a micro-batch, a row about as
    long is preferred with which all micro-batches get as many rows.
    """
    counts = Counter(lengths)
    best: Filling | None = None
    for capacity in _capacities(sum(lengths), max(lengths), limit):
        filling = fill(counts, capacity)
        if best is None or filling.padding < best.padding:
            best = filling
        if best.padding <= PADDING_GOAL:
            break
    assert best is not None  # there is at least one capacity
    even = _even(counts, best, limit, budget) if budget is not None else None
    return best.row_length if even is None else even.row_length


def _even(counts: Counter[int], base: Filling, limit: int, budget: int) -> Filling | None:
    """A filling like ``base`` whose rows share out evenly over micro-batches; None where none is as good.

    As few micro-batches as there can be come first: ranks with as many tokens then have as many of them.
    """
    total = sum(length * count for length, count in counts.items())
    longest = max(counts)
    for micros in dict.fromkeys((-(-total // budget), -(-base.rows // max(1, budget // base.row_length)))):
        near = sorted(range(micros, 2 * base.rows + micros, micros), key=lambda rows: abs(rows - base.rows))
        for rows, slack in product(near[:_NEAR], (0.0, 0.0025, 0.005, 0.0075)):
            capacity = max(longest, -int(-total * (1 + slack) // rows))
            if capacity > limit or capacity * rows > budget * micros:
                continue
            filling = fill(counts, capacity)
            if filling.rows % micros == 0 and filling.padding <= max(PADDING_GOAL, base.padding):
                return filling
    return None


def fill(counts: Counter[int], capacity: int) -> Filling:
    """Fill rows of ``capacity`` with sequences; ``counts`` says how many there are of each length."""
    left = dict(sorted(counts.items(), reverse=True))
    patterns: list[tuple[Pattern, int]] = []
    while left:
        longest = next(iter(left))
        pattern = (longest, *_remainder(left, longest, capacity))
        needed = Counter(pattern)
        times = min(left[length] // count for length, count in needed.items())
        patterns.append((pattern, times))
        for length, count in needed.items():
            left[length] -= count * times
            if not left[length]:
                del left[length]
    rows = sum(times for _, times in patterns)
    row_length = max(sum(pattern) for pattern, _ in patterns)
    used = sum(length * count for length, count in counts.items())
    return Filling(tuple(patterns), 1 - used / (rows * row_length), row_length)


def balance(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Share indices out so that the sums of their lengths are nearly equal (longest processing time first).

    Returns ``parts`` lists of indices, each ascending; some may be empty. Deterministic.
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, part) for part in range(parts)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, part = heap[0]
        shares[part].append(index)
        heapq.heapreplace(heap, (load + lengths[index], part))
    return [sorted(share) for share in shares]


def _capacities(total: int, longest: int, limit: int) -> Iterator[int]:
    """Row lengths to try, shortest first: those that share ``total`` evenly, with a little room to spare."""
    seen: set[int] = set()
    rows = max(1, total // longest)
    while rows and len(seen) < _CANDIDATES:
        for slack in (0.0, 0.005) if rows > 200 else (0.0, 0.0025, 0.005, 0.01):
            capacity = max(longest, -int(-total * (1 + slack) // rows))
            if capacity <= limit and capacity not in seen:
                seen.add(capacity)
                yield capacity
        rows = min(rows - 1, int(rows * 0.85))
    if not seen:
        yield limit


def _remainder(left: dict[int, int], longest: int, capacity: int) -> Pattern:
    """The lengths that best fill what ``longest`` leaves of a row. ``left`` is in descending order."""
    room = capacity - longest
    enough = room - capacity // 400
    reach = 1  # bit s: some choice of the lengths seen so far sums to s
    mask = (1 << (room + 1)) - 1
    trail: list[tuple[int, int, int]] = []
    for length, copies in _items(left, longest, room):
        trail.append((reach, length, copies))
        reach |= (reach << (length * copies)) & mask
        if reach.bit_length() > enough:
            break
    target = reach.bit_length() - 1
    chosen: list[int] = []
    for before, length, copies in reversed(trail):
        if not (before >> target) & 1:
            chosen.extend([length] * copies)
            target -= length * copies
    return tuple(chosen)


def _items(left: dict[int, int], longest: int, room: int) -> Iterator[tuple[int, int]]:
    """(length, copies) of a bounded subset sum; powers of two, so that few items say every count."""
    for length, count in left.items():
        if length > room:
            continue
        available = min(count - (length == longest), room // length)
        copies = 1
        while available > 0:
            yield length, min(copies, available)
            available -= copies
            copies *= 2
