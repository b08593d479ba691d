"""Runs rewards over samples, measures them, and decides what an error does. No model, no training."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from posttune.config.models import PluginRef
from posttune.errors import DataError, PluginCallError, PluginReturnError
from posttune.facade import Rewards, build_rewards
from posttune.nearest import nearest
from posttune.reward.calls import seconds_by_sample
from posttune.reward.scoring import scalar
from posttune.types import Needs, Sample, Score

FAILURES = (PluginCallError, PluginReturnError, DataError)


@dataclass(frozen=True)
class OnError:
    """What a reward that fails on a sample does: end the run, leave the sample out, or give it ``value``."""

    policy: Literal["raise", "mask", "value"] = "raise"
    value: float = 0.0

    @property
    def score(self) -> Score:
        """What a failed sample gets, where the run goes on."""
        return self.value if self.policy == "value" else None


@dataclass(frozen=True)
class Tally:
    """What one reward did. Seconds are of a sample; a reward that takes all at once shares its time out."""

    mean: float | None  # of the scored samples, as are the next three
    std: float | None  # of the population
    min: float | None
    max: float | None
    scored: int
    unscorable: int
    timeouts: int
    errors: int
    seconds_p50: float
    seconds_p95: float
    seconds_max: float
    slowest: str  # id of the sample that took seconds_max
    seconds: float  # in all


@dataclass(frozen=True)
class RewardRun:
    """Scores and tallies, by label."""

    scores: Mapping[str, list[Score]]
    tallies: Mapping[str, Tally]


def run_rewards(
    refs: Sequence[PluginRef], samples: Sequence[Sample], on_error: OnError = OnError()
) -> RewardRun:
    """Score all samples with each reward, one reward after the other.

    Raises what ``build_rewards`` raises, DataError where the samples lack what a reward needs, and,
    where the policy is raise, what a reward's first failure raises.
    """
    check_needs(build_rewards(refs).needs, samples)
    scores: dict[str, list[Score]] = {}
    tallies: dict[str, Tally] = {}
    for ref in refs:
        scores[ref.tag], tallies[ref.tag] = _run_one(build_rewards([ref]), samples, on_error)
    return RewardRun(scores, tallies)


def check_needs(needs: Mapping[str, Needs], samples: Sequence[Sample]) -> None:
    """Raise DataError for the first sample that lacks what a reward needs, by the reward's label."""
    for label, need in needs.items():
        for sample in samples:
            if need.reference and sample.reference is None:
                what = f"reward {label!r} needs a reference, and sample {sample.id} has none"
                raise DataError(what, fix="name the column of the reference, or leave the reward out")
            missing = [column for column in need.columns if column not in sample.columns]
            if missing:
                likely = nearest(missing[0], sample.columns)
                hint = f" (did you mean {likely!r}?)" if likely else ""
                what = (
                    f"reward {label!r} needs the column {missing[0]!r}{hint}, and sample {sample.id} lacks it"
                )
                raise DataError(what, fix=f"its columns are {', '.join(sorted(sample.columns)) or 'none'}")


def _run_one(reward: Rewards, samples: Sequence[Sample], on_error: OnError) -> tuple[list[Score], Tally]:
    """All samples at once; where that fails and the run goes on, one by one, to find those that fail."""
    began = time.perf_counter()
    failed: set[int] = set()
    with seconds_by_sample() as each:
        try:
            scores = _only(reward.score(samples))
        except FAILURES:
            if on_error.policy == "raise":
                raise
            each.clear()
            scores = [_one(reward, sample, i, failed, on_error) for i, sample in enumerate(samples)]
    total = time.perf_counter() - began
    return scores, tally(scores, samples, each, total, errors=failed)


def _one(reward: Rewards, sample: Sample, index: int, failed: set[int], on_error: OnError) -> Score:
    try:
        return _only(reward.score([sample]))[0]
    except FAILURES:
        failed.add(index)
        return on_error.score


def _only(scores: Mapping[str, list[Score]]) -> list[Score]:
    (found,) = scores.values()
    return found


def tally(
    scores: Sequence[Score],
    samples: Sequence[Sample],
    seconds: Mapping[str, float],
    total: float,
    *,
    errors: set[int] | frozenset[int] = frozenset(),
) -> Tally:
    """Statistics of one reward's scores. ``seconds`` by sample id, where they are known."""
    values = [scalar(score) for i, score in enumerate(scores) if i not in errors and score is not None]
    numbers = np.array(values, dtype=np.float64)
    share = total / len(samples) if samples else 0.0
    times = np.array([seconds.get(sample.id, share) for sample in samples] or [0.0])
    return Tally(
        mean=_finite(numbers.mean()) if len(numbers) else None,
        std=_finite(numbers.std()) if len(numbers) else None,
        min=_finite(numbers.min()) if len(numbers) else None,
        max=_finite(numbers.max()) if len(numbers) else None,
        scored=len(numbers),
        unscorable=len(scores) - len(numbers) - len(errors),
        timeouts=0,
        errors=len(errors),
        seconds_p50=float(np.percentile(times, 50)),
        seconds_p95=float(np.percentile(times, 95)),
        seconds_max=float(times.max()),
        slowest=samples[int(times.argmax())].id if samples else "",
        seconds=total,
    )


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
