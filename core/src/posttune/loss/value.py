"""The critic's loss, and how much of the returns it explains."""

from __future__ import annotations

import torch
from torch import Tensor

from posttune.types import Reduce, TokenLoss


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None = 0.2
) -> TokenLoss:
    """Squared error of each token, unreduced: [N], 0 where not ``mask``.

    L = max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2; ``clip`` None is off
    (Schulman et al. 2017, arXiv:1707.06347, and its reference code).
    """
    new, old, target = (torch.where(mask, each, 0.0) for each in (values, old_values, returns))
    loss = (new - target).square()
    metrics = {}
    if clip is not None:
        clipped = (new.clamp(old - clip, old + clip) - target).square()
        metrics["value/clip_fraction"] = ((clipped > loss).sum(), mask.sum())
        loss = torch.maximum(loss, clipped)
    return TokenLoss(0.5 * loss, metrics)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, reduce: Reduce) -> float:
    """1 - var(R - V) / var(R) over the tokens with mask of all ranks; 0 where returns do not vary."""
    residual, target = (torch.where(mask, each.double(), 0.0) for each in (returns - values, returns))
    sums = reduce(torch.stack([mask.sum().double(), residual.sum(), target.sum()]))
    means = sums[1:] / sums[0].clamp(min=1)
    squares = [
        torch.where(mask, (each - mean).square(), 0.0).sum()
        for each, mean in zip((residual, target), means, strict=True)
    ]
    unexplained, total = reduce(torch.stack(squares)).tolist()
    return 1 - unexplained / total if total > 0 else 0.0
