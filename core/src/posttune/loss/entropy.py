"""Entropy of the distribution over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """-sum p log p in nats over the last dimension: [..., V] to [...], float32 or wider. Differentiable.

    A logit of minus infinity (a token that cannot be drawn) adds nothing.
    """
    logp = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    finite = torch.where(torch.isneginf(logp), 0.0, logp)
    return -(logp.exp() * finite).sum(-1)
