"""What a reward did with a batch, in numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RewardStats:
    """What one reward did with a batch. Seconds are of a sample that was scored, cached ones aside."""

    scored: int
    unscorable: int  # the reward's own None and NaN, and what was left out: timeouts and errors too
    nan: int
    seconds: float  # in all
    timeouts: int = 0
    errors: int = 0
    cached: int = 0  # and repeated within the batch
    seconds_p50: float = 0.0
    seconds_p95: float = 0.0
    seconds_max: float = 0.0
    slowest: str = ""  # id of the sample that took seconds_max
    failed: frozenset[int] = frozenset()  # positions of the samples with an error or a timeout
    seconds_by_sample: Mapping[str, float] = field(default_factory=dict, repr=False)  # by id


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of them lies, interpolated as NumPy does; 0 where there is none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(seconds: Mapping[str, float]) -> dict[str, Any]:
    """The fields of RewardStats that tell how long samples took, by id of the sample."""
    times = list(seconds.values())
    slowest = max(seconds, key=seconds.__getitem__, default="")
    return {
        "seconds_p50": percentile(times, 0.5),
        "seconds_p95": percentile(times, 0.95),
        "seconds_max": seconds.get(slowest, 0.0),
        "slowest": slowest,
        "seconds_by_sample": seconds,
    }
