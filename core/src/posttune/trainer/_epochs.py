"""Whole passes over the data: a step never spans two of them, and their metrics survive a restart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posttune.trainer._prompts import Prompts, PromptStream
from posttune.trainer.loop import Position, StepOutput
from posttune.trainer.rl_step import RlWork

LAST = frozenset({"lr", "kl_coef", "rollout/weight_version"})
MAXIMA = ("_max", "memory/peak_mb")
COUNTS = ("/timeouts", "/errors", "/nonfinite_steps")


@dataclass(frozen=True)
class EpochPrompts(PromptStream):
    """Ends a pass with a smaller step where the rows are no multiple of ``count``."""

    @classmethod
    def like(cls, stream: PromptStream) -> EpochPrompts:
        """The same stream, cut at the end of every pass."""
        return cls(stream.dataset, stream.sampler, stream.count, stream.seed, stream.ranks)

    def take(self, position: int, count: int | None = None) -> Prompts:
        """The prompts from ``position`` on, none of the next pass: a refill at its beginning gets none."""
        done = position % self.sampler.size
        left = self.sampler.size - done if done or count is None else 0
        return super().take(position, min(count or self.count, left))


@dataclass
class EpochMetrics:
    """The metrics of the steps of a pass, weighted by their samples."""

    totals: dict[str, list[float]] = field(default_factory=dict)  # sum of weight x value, sum of weights
    sums: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)  # and maxima
    rewards: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # count, sum, sum of squares

    def add(self, metrics: Mapping[str, float], rows: int) -> None:
        """Take a step's metrics and its number of prompts."""
        for name, value in metrics.items():
            if name in LAST:
                self.last[name] = value
            elif name.endswith(MAXIMA):
                self.last[name] = max(value, self.last.get(name, -math.inf))
            elif name.startswith("time/") or name.endswith(COUNTS):
                self.sums[name] = self.sums.get(name, 0.0) + value
            else:
                total = self.totals.setdefault(name, [0.0, 0.0])
                total[0] += rows * value
                total[1] += rows
        if "reward/mean" in metrics:
            scored = rows * (1 - metrics.get("reward/unscorable_fraction", 0.0))
            mean, std = metrics["reward/mean"], metrics.get("reward/std", 0.0)
            parts = (scored, scored * mean, scored * (std * std + mean * mean))
            self.rewards = [old + new for old, new in zip(self.rewards, parts, strict=True)]

    def result(self) -> dict[str, float]:
        """``reward``, ``reward_std`` and ``kl`` of the pass, then the metrics by the names of a step's.

        Means are over samples, times and counts of faults are sums, ``lr`` and ``kl_coef`` are the last
        ones. Without any scored sample ``reward`` is NaN; without a reference there is no ``kl``.
        """
        mean, std = self._reward()
        means = {name: total / weight for name, (total, weight) in self.totals.items() if weight}
        means |= {"reward/mean": mean, "reward/std": std} if "reward/mean" in means else {}
        return {"reward": mean, "reward_std": std, **means, **self.sums, **self.last}

    def _reward(self) -> tuple[float, float]:
        count, total, squares = self.rewards
        if not count:
            return math.nan, math.nan
        mean = total / count
        return mean, math.sqrt(max(0.0, squares / count - mean * mean))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; JSON."""
        return {"totals": self.totals, "sums": self.sums, "last": self.last, "rewards": self.rewards}


@dataclass
class EpochWork:
    """The work of an RL stage, which also gathers the metrics of the pass in progress."""

    inner: RlWork
    metrics: EpochMetrics = field(default_factory=EpochMetrics)

    def begin(self, position: Position) -> None:
        """See ``RlWork.begin``."""
        self.inner.begin(position)

    def step(self, position: Position) -> StepOutput:
        """Take a step, and note its metrics."""
        output = self.inner.step(position)
        self.metrics.add(output.metrics, output.rows)
        return output

    def nonfinite_in_a_row(self) -> int:
        """See ``RlWork.nonfinite_in_a_row``."""
        return self.inner.nonfinite_in_a_row()

    def state(self) -> dict[str, Any]:
        """That of the inner work, and the pass in progress."""
        return {**self.inner.state(), "epoch": self.metrics.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from ``state``."""
        self.inner.load_state(state)
        self.metrics = EpochMetrics(**state["epoch"])
