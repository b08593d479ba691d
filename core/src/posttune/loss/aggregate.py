"""From the values of single tokens to one number, the same for any split over micro-batches and ranks."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from posttune import _segments as segments
from posttune.errors import UserError
from posttune.types import Packed, Totals

Mode = Literal[
    "token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_sum_norm", "seq_mean_token_mean"
]
MODES: tuple[str, ...] = get_args(Mode)


def aggregate(
    token_values: Tensor, packed: Packed, mode: str, totals: Totals, loss_scale: float | None = None
) -> Tensor:
    """This part's share of the mean or sum over the whole batch: a scalar, differentiable.

    ``totals`` counts the whole batch. The sum of the shares over micro-batches and ranks (gradients
    are summed, not averaged) is the value of the whole. With B sequences that have a token:

    token_mean               sum over tokens / tokens
    token_sum                sum over tokens
    seq_mean_token_sum       mean over sequences of their sums
    seq_mean_token_sum_norm  the same / loss_scale, or / totals.max_length where none is given
    seq_mean_token_mean      mean over sequences of their means

    Masked tokens and sequences without tokens do not count. Without any token the value is 0.
    Raises UserError for another mode.
    """
    kept = torch.where(packed.mask, token_values, 0.0).double()
    sequences, tokens = max(totals.sequences, 1), max(totals.tokens, 1)
    if mode == "token_mean":
        total = kept.sum() / tokens
    elif mode == "token_sum":
        total = kept.sum()
    elif mode == "seq_mean_token_sum":
        total = kept.sum() / sequences
    elif mode == "seq_mean_token_sum_norm":
        scale = max(totals.max_length, 1) if loss_scale is None else loss_scale
        total = kept.sum() / sequences / scale
    elif mode == "seq_mean_token_mean":
        total = segments.masked_means(kept, packed).sum() / sequences
    else:
        raise UserError(f"no aggregation {mode!r}", fix=f"choose one of {', '.join(MODES)}")
    return total.to(token_values.dtype)


def count(packed: Packed) -> Totals:
    """The totals of one part. Sum tokens and sequences over parts, and take the largest max_length."""
    counts = segments.token_counts(packed)
    longest = packed.cu_seqlens.diff()
    return Totals(
        tokens=int(counts.sum()),
        sequences=int((counts > 0).sum()),
        max_length=int(longest.max()) if len(longest) else 0,
    )
