"""From samples to rewards: every reward scores, the manager combines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from posttune.facade import RewardManager, Rewards, RewardStats, Scoring
from posttune.reward.scoring import scalar
from posttune.trainer.metrics import Meter
from posttune.types import Packed, Reward, Sample, Score


@dataclass(frozen=True)
class Judged:
    """Scores by label of the reward, and what the manager made of them; one entry a sample."""

    scores: Mapping[str, Sequence[Score]]
    rewards: Sequence[Reward]
    stats: Mapping[str, RewardStats] = field(default_factory=dict)  # of the scoring, by label

    def joined(self, other: Judged) -> Judged:
        """Both, one behind the other; they have the same labels."""
        scores = {label: [*column, *other.scores[label]] for label, column in self.scores.items()}
        return Judged(scores, [*self.rewards, *other.rewards])

    def only(self, rows: Sequence[int]) -> Judged:
        """Those of the samples ``rows``."""
        scores = {label: [column[row] for row in rows] for label, column in self.scores.items()}
        return Judged(scores, [self.rewards[row] for row in rows])

    def values(self, device: torch.device) -> Tensor:
        """Reward of each sample, float64 [S]; NaN where there is none."""
        found = [float("nan") if reward.value is None else reward.value for reward in self.rewards]
        return torch.tensor(found, dtype=torch.float64, device=device)

    def dimensions(self, device: torch.device) -> dict[str, Tensor]:
        """Reward of each sample by dimension, float64 [S] each; NaN where a sample lacks it."""
        names = sorted({name for reward in self.rewards for name in reward.dims})
        nan = float("nan")
        return {
            name: torch.tensor(
                [reward.dims.get(name, nan) for reward in self.rewards], dtype=torch.float64, device=device
            )
            for name in names
        }


def judge(
    samples: Sequence[Sample], rewards: Rewards, manager: RewardManager, begun: Scoring | None = None
) -> Judged:
    """Score and combine. An answer that its engine broke off is not the policy's and has no reward.

    ``begun`` is what ``rewards.submit(samples)`` returned: it is then only waited for.
    """
    if not samples:
        return Judged({label: [] for label in rewards.labels}, [])
    scores = rewards.score(samples) if begun is None else begun.result()
    combined = manager.combine(samples, scores)
    kept = [_unless_aborted(*pair) for pair in zip(samples, combined, strict=True)]
    return Judged(scores, kept, dict(rewards.stats) if begun is None else begun.stats)


def _unless_aborted(sample: Sample, reward: Reward) -> Reward:
    aborted = sample.completion is not None and sample.completion.finish_reason == "abort"
    return replace(reward, value=None, per_token=None) if aborted else reward


def token_rewards(rewards: Sequence[Reward], packed: Packed) -> Tensor:
    """Reward of each response token, float64 [N]: the manager's own, or all of it at the last token.

    The last token is the last of the policy's. An unscorable sample has 0 everywhere.
    """
    ends = packed.cu_seqlens.tolist()
    mask = packed.mask.tolist()
    tokens = [0.0] * len(mask)
    for reward, start, end in zip(rewards, ends, ends[1:], strict=False):
        if reward.value is None:
            continue
        if reward.per_token is not None:
            tokens[start:end] = reward.per_token
            continue
        last = next((place for place in range(end - 1, start - 1, -1) if mask[place]), None)
        if last is not None:
            tokens[last] = reward.value
    values = torch.tensor(tokens, dtype=torch.float64, device=packed.mask.device)
    return torch.where(packed.mask, values, 0.0)


def note_rewards(meter: Meter, judged: Judged) -> None:
    """Mean and deviation of the reward, the mean of every reward and dimension, and what went unscored."""
    values = [reward.value for reward in judged.rewards if reward.value is not None]
    meter.spread("reward", values)
    meter.mean("reward/unscorable_fraction", len(judged.rewards) - len(values), len(judged.rewards))
    for label, scores in judged.scores.items():
        for name, numbers in score_columns(label, scores).items():
            known = [number for number in numbers if number is not None]
            meter.mean(f"{name}/mean", sum(known), len(known))
    _note_execution(meter, judged.stats)


def _note_execution(meter: Meter, stats: Mapping[str, RewardStats]) -> None:
    """Time-outs and errors of every reward, and how long its samples took: the slowest rank's seconds."""
    for label, each in stats.items():
        meter.sum(f"reward/{label}/timeouts", each.timeouts)
        meter.sum(f"reward/{label}/errors", each.errors)
        meter.peak(f"reward/{label}/seconds_p50", each.seconds_p50)
        meter.peak(f"reward/{label}/seconds_p95", each.seconds_p95)
        meter.peak(f"reward/{label}/seconds_max", each.seconds_max)


def score_columns(label: str, scores: Sequence[Score]) -> dict[str, list[float | None]]:
    """``reward/<label>``, and ``reward/<label>/<dimension>`` where there are dimensions; None: unscorable."""
    columns: dict[str, list[float | None]] = {f"reward/{label}": [scalar(score) for score in scores]}
    names = sorted({name for score in scores if isinstance(score, Mapping) for name in score})
    for name in names:
        found = [score.get(name) if isinstance(score, Mapping) else None for score in scores]
        columns[f"reward/{label}/{name}"] = found
    return columns
