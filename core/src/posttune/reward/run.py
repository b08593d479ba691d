"""Runs rewards over samples, measures them, and decides what an error does. No model, no training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from posttune.config.models import PluginRef, RewardRef
from posttune.errors import DataError
from posttune.facade import RewardStats, build_rewards
from posttune.nearest import nearest
from posttune.reward.scoring import scalar
from posttune.types import Needs, Sample, Score


@dataclass(frozen=True)
class OnError:
    """What a reward that fails on a sample does: end the run, leave the sample out, or give it ``value``."""

    policy: Literal["raise", "mask", "value"] = "raise"
    value: float = 0.0

    def of(self, ref: PluginRef) -> RewardRef:
        """The same reward under this policy."""
        fields = ref.model_dump() | {"on_error": self.policy}
        return RewardRef(**fields | {"value": self.value if self.policy == "value" else None})


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
    seconds_by_sample: Mapping[str, float]


@dataclass(frozen=True)
class RewardRun:
    """Scores and tallies, by label."""

    scores: Mapping[str, list[Score]]
    tallies: Mapping[str, Tally]


def run_rewards(
    refs: Sequence[PluginRef], samples: Sequence[Sample], on_error: OnError | None = None
) -> RewardRun:
    """Score all samples with each reward, the rewards side by side. ``on_error`` overrides their own.

    Raises what ``build_rewards`` raises, DataError where the samples lack what a reward needs, and,
    where the policy is raise, what a reward's first failure raises.
    """
    rewards = build_rewards(refs if on_error is None else [on_error.of(ref) for ref in refs])
    check_needs(rewards.needs, samples)
    try:
        scores = rewards.score(samples)
    finally:
        rewards.close()
    return RewardRun(scores, {label: tally(scores[label], rewards.stats[label]) for label in scores})


def check_needs(needs: Mapping[str, Needs], samples: Sequence[Sample]) -> None:
    """Raise DataError for the first sample that lacks what a reward needs, by the reward's label."""
    for label, need in needs.items():
        for sample in samples:
            if need.reference and sample.reference is None:
                what = f"reward {label!r} needs a reference, and sample {sample.name} has none"
                raise DataError(what, fix="name the column of the reference, or leave the reward out")
            missing = [column for column in need.columns if column not in sample.columns]
            if missing:
                likely = nearest(missing[0], sample.columns)
                hint = f" (did you mean {likely!r}?)" if likely else ""
                column = f"reward {label!r} needs the column {missing[0]!r}{hint}"
                what = f"{column}, and sample {sample.name} lacks it"
                raise DataError(what, fix=f"its columns are {', '.join(sorted(sample.columns)) or 'none'}")


def tally(scores: Sequence[Score], stats: RewardStats) -> Tally:
    """Statistics of one reward's scores; those that stand for a failure are left out."""
    own = [score for i, score in enumerate(scores) if i not in stats.failed]
    numbers = np.array([scalar(score) for score in own if score is not None], dtype=np.float64)
    return Tally(
        mean=_finite(numbers.mean()) if len(numbers) else None,
        std=_finite(numbers.std()) if len(numbers) else None,
        min=_finite(numbers.min()) if len(numbers) else None,
        max=_finite(numbers.max()) if len(numbers) else None,
        scored=len(numbers),
        unscorable=len(own) - len(numbers),
        timeouts=stats.timeouts,
        errors=stats.errors,
        seconds_p50=stats.seconds_p50,
        seconds_p95=stats.seconds_p95,
        seconds_max=stats.seconds_max,
        slowest=stats.slowest,
        seconds=stats.seconds,
        seconds_by_sample=stats.seconds_by_sample,
    )


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
