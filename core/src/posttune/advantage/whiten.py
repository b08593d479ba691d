"""Zero mean and unit variance over a batch that may be spread over ranks. Statistics are float64.

Every function calls ``reduce`` the same number of times whatever its input, so that ranks stay in step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttune.types import Reduce

# A spread below this share of the mean is rounding: the values are equal.
RESOLUTION = 16 * torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Moments:
    """Of the places with mask, on all ranks: float64 scalars."""

    count: Tensor
    mean: Tensor  # 0 without any place
    var: Tensor  # 0 where it is not defined (count <= ddof), and where all values are equal


def moments(values: Tensor, mask: Tensor, reduce: Reduce, *, ddof: int = 1) -> Moments:
    """Count, mean and variance of ``values`` [N] where ``mask`` [N], over all ranks; two passes."""
    kept = torch.where(mask, values.double(), 0.0)
    total = reduce(torch.stack([mask.sum().double(), kept.sum()]))
    count, mean = total[0], total[1] / total[0].clamp(min=1)
    squares = torch.where(mask, (kept - mean).square(), 0.0).sum()
    spread = reduce(squares[None])[0]
    equal = spread <= count * (RESOLUTION * mean).square()
    defined = (count > ddof) & ~equal
    return Moments(count, mean, torch.where(defined, spread / (count - ddof).clamp(min=1), 0.0))


def whiten(
    values: Tensor, mask: Tensor, reduce: Reduce, *, ddof: int = 1, eps: float = 1e-8, shift_mean: bool = True
) -> Tensor:
    """(x - mean) / sqrt(var + eps) where ``mask``, 0 elsewhere: float64 [N].

    ``shift_mean=False`` adds the mean again after scaling. With fewer than ``ddof + 1`` places, or
    with equal values, the centred value is 0. ``var`` divides by count - ddof.
    """
    stats = moments(values, mask, reduce, ddof=ddof)
    scaled = (values.double() - stats.mean) * torch.rsqrt(stats.var + eps)
    centred = torch.where(mask & (stats.var > 0), scaled, 0.0)
    return centred if shift_mean else torch.where(mask, centred + stats.mean, 0.0)


def standardise(values: Tensor, mask: Tensor, reduce: Reduce, *, ddof: int = 1, eps: float = 1e-4) -> Tensor:
    """(x - mean) / (std + eps) where ``mask``, 0 elsewhere: float64 [N]; 0 where whiten gives 0."""
    stats = moments(values, mask, reduce, ddof=ddof)
    scaled = (values.double() - stats.mean) / (stats.var.sqrt() + eps)
    return torch.where(mask & (stats.var > 0), scaled, 0.0)
