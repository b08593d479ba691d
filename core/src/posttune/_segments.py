"""Sums over the sequences of a packed batch. Shapes: N response tokens of S sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from posttune.types import Packed


def lengths(cu_seqlens: Tensor) -> Tensor:
    """Tokens of each sequence, masked ones included: int64 [S]."""
    return cu_seqlens.diff().long()


def sequence_index(cu_seqlens: Tensor) -> Tensor:
    """The sequence that each token belongs to: int64 [N]."""
    size = lengths(cu_seqlens)
    return torch.repeat_interleave(torch.arange(len(size), device=size.device), size)


def segment_sum(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum of the values that share an index: [count], in the type of ``values``. Differentiable."""
    return values.new_zeros(count).index_add(0, index, values)


def token_counts(packed: Packed) -> Tensor:
    """Tokens with mask of each sequence: int64 [S]."""
    index = sequence_index(packed.cu_seqlens)
    return segment_sum(packed.mask.long(), index, len(packed.cu_seqlens) - 1)


def masked_sums(values: Tensor, packed: Packed) -> Tensor:
    """Sum over the tokens with mask of each sequence: [S], in the type of ``values``."""
    kept = torch.where(packed.mask, values, 0.0)
    return segment_sum(kept, sequence_index(packed.cu_seqlens), len(packed.cu_seqlens) - 1)


def masked_means(values: Tensor, packed: Packed) -> Tensor:
    """Mean over the tokens with mask of each sequence: [S]; 0 where there are none."""
    return masked_sums(values, packed) / token_counts(packed).clamp(min=1).to(values.dtype)


def spread(per_sequence: Tensor, packed: Packed) -> Tensor:
    """Each sequence's value at each of its tokens, masked ones included: [N]."""
    return per_sequence.index_select(0, sequence_index(packed.cu_seqlens))


def suffix_sums(values: Tensor, cu_seqlens: Tensor, discount: float) -> Tensor:
    """y_t = x_t + discount * y_{t+1} within each sequence: [N].

    By doubling: after k rounds each place holds the discounted sum of the next 2^k values, so the
    longest sequence costs log2(length) vector operations and no padding.
    """
    ends = cu_seqlens.long().index_select(0, sequence_index(cu_seqlens) + 1)
    left = ends - torch.arange(len(values), device=values.device)  # tokens from t to the end, t included
    longest = int(left.max()) if len(left) else 0
    step = 1
    while step < longest:
        ahead = torch.where(left[:-step] > step, discount**step * values[step:], 0.0)
        values = torch.cat([values[:-step] + ahead, values[-step:]])
        step *= 2
    return values
