"""Statistics of the samples that answer one prompt. Everything is float64, and [S] at each sample."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor

from posttune import _segments as segments
from posttune.types import AdvantageBatch

Singleton = Literal["refuse", "zero", "raw"]


def usable(batch: AdvantageBatch) -> Tensor:
    """Samples that enter statistics: scored (not NaN) and with at least one token of the policy: bool [S]."""
    return ~torch.isnan(batch.scores) & (segments.token_counts(batch.packed) > 0)


def group_index(ids: Sequence[Hashable]) -> Tensor:
    """Groups numbered in the order of their first sample: int64 [S]. Ids are any hashable."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in ids], dtype=torch.long)


class Groups:
    """The members of each group; samples that are not ``members`` (bool [S]) are left out of everything.

    ``singleton`` is what the only member of a group gets: "raw" is its uncentred value (mean 0,
    deviation 1); "zero" is 0. "refuse" is a rule for configurations, where one sample per prompt
    is an error; a group of one that arises from masking is then treated as "zero".
    """

    def __init__(self, ids: Sequence[Hashable], members: Tensor, singleton: Singleton = "refuse") -> None:
        self.index = group_index(ids).to(members.device)  # [S]
        self.members = members
        self.size = self.sum(torch.ones_like(self.index, dtype=torch.float64))
        self.single = members & (self.size == 1)
        self.raw = self.single if singleton == "raw" else torch.zeros_like(members)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the members of each sample's group."""
        kept = torch.where(self.members, values, 0.0)
        return segments.segment_sum(kept, self.index, len(self.index))[self.index]

    def low(self, values: Tensor) -> Tensor:
        """Least value of each sample's group; infinity where a group has no member."""
        kept = torch.where(self.members, values, torch.inf)
        start = torch.full_like(kept, torch.inf)
        return start.scatter_reduce(0, self.index, kept, "amin")[self.index]

    def constant(self, values: Tensor) -> Tensor:
        """Members of groups of two or more whose values are all equal: bool [S]."""
        equal = self.low(values) == -self.low(-values)
        return self.members & (self.size > 1) & equal

    def centred(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """x minus the (weighted) mean of its group; 0 for what is no member.

        The mean is taken of the distances to the group's least value. These are exact for values
        that lie close together, and 0 where all are equal: a constant group gives exactly 0.
        """
        above = torch.where(self.members, values - self.low(values), 0.0)
        mean = self.mean(above, weights)
        return torch.where(self.raw, values, torch.where(self.members, above - mean, 0.0))

    def mean(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Weighted mean over the members of each sample's group; equal weights where none are given."""
        weight = torch.ones_like(values) if weights is None else weights
        total = self.sum(weight)
        return self.sum(weight * values) / torch.where(total > 0, total, 1.0)

    def std(self, values: Tensor, ddof: int = 1) -> Tensor:
        """Standard deviation of each sample's group, dividing by size - ddof; 1 in a group of one."""
        above = torch.where(self.members, values - self.low(values), 0.0)
        squares = self.sum((above - self.mean(above)).square())
        return torch.where(self.single, 1.0, (squares / (self.size - ddof).clamp(min=1)).sqrt())

    def scaled(self, values: Tensor, *, eps: float, ddof: int = 1) -> Tensor:
        """Centred, divided by std + eps. At most (n - 1) / sqrt(n) in size for ddof 1; 0 where constant."""
        width = self.std(values, ddof) + eps
        return self.centred(values) / torch.where(width > 0, width, 1.0)
