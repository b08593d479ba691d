"""How far the trainer's log-probabilities are from the rollout engine's, and weights that make up for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from posttune import _segments as segments
from posttune.types import Packed

LOG_LIMIT = 20.0


@dataclass(frozen=True)
class Gap:
    """Sums over tokens, so that the parts of a batch add up whatever the split. Plain numbers."""

    tokens: int = 0
    total: float = 0.0  # of |trainer - rollout|
    largest: float = 0.0
    weights: float = 0.0  # of w = exp(trainer - rollout)
    squares: float = 0.0  # of w^2

    def __add__(self, other: Gap) -> Gap:
        return Gap(
            self.tokens + other.tokens,
            self.total + other.total,
            max(self.largest, other.largest),
            self.weights + other.weights,
            self.squares + other.squares,
        )

    def metrics(self) -> dict[str, float]:
        """Mean and largest gap; effective share of samples, (sum w)^2 / (n sum w^2). {} without tokens."""
        if not self.tokens:
            return {}
        return {
            "rollout/logprob_gap_mean": self.total / self.tokens,
            "rollout/logprob_gap_max": self.largest,
            "rollout/effective_sample_size": self.weights**2 / (self.tokens * self.squares),
        }


def gap(trainer_logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> Gap:
    """The gap over the tokens with mask of one part: inputs [N]. Weights are clamped to exp(+-20)."""
    if not bool(mask.any()):
        return Gap()
    distance = (trainer_logp.detach().double() - rollout_logp.double())[mask]
    weights = distance.clamp(-LOG_LIMIT, LOG_LIMIT).exp()
    sums = torch.stack([distance.abs().sum(), distance.abs().max(), weights.sum(), weights.square().sum()])
    return Gap(len(distance), *sums.tolist())


def importance_weights(
    trainer_logp: Tensor,
    rollout_logp: Tensor,
    packed: Packed,
    *,
    level: Literal["token", "sequence", "geometric"] = "token",
    mode: Literal["truncate", "mask"] = "truncate",
    cap: float = 2.0,
    floor: float = 0.0,
) -> Tensor:
    """Weights pi_trainer / pi_rollout to multiply token losses by: [N], no gradient, 0 where not mask.

    ``level``: of the token, of the whole sequence (the product), or its geometric mean per token.
    ``mode``: "truncate" is min(w, cap) (Espeholt et al. 2018, arXiv:1802.01561); "mask" keeps w within
    [floor, cap] and gives 0 outside, which leaves the token or sequence out. Log-weights are clamped
    to +-20. A weight of 0 takes the place of the loss, not of the count: the denominator stays.
    """
    distance = torch.where(packed.mask, trainer_logp.detach() - rollout_logp, 0.0)
    if level == "sequence":
        distance = segments.spread(segments.masked_sums(distance, packed), packed)
    elif level == "geometric":
        distance = segments.spread(segments.masked_means(distance, packed), packed)
    weights = distance.clamp(-LOG_LIMIT, LOG_LIMIT).exp()
    if mode == "truncate":
        weights = weights.clamp(max=cap)
    else:
        weights = torch.where((weights >= floor) & (weights <= cap), weights, 0.0)
    return torch.where(packed.mask, weights, 0.0)
