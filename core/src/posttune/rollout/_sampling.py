"""Drawing tokens: uniforms that belong to a sample, and inverse-CDF sampling.

A completion must not depend on what shares its batch. So the randomness of sample ``i`` of a
request is a function of (seed, i, position) alone, and tokens come from it by the inverse of the
cumulative distribution. Rounding differs between batch shapes by about 1e-7; a flat search over a
large vocabulary would let that move a boundary past its neighbours in the tail, so the search has
two levels (a block, then a token in it), each with a uniform of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from posttune.types import Sampling

FLAT_VOCABULARY = 1024  # up to here one block holds all tokens

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: Sequence[int], indices: Sequence[int], length: int) -> Tensor:
    """Uniforms in [0, 1): float32 [rows, length, 2], row r from (seeds[r], indices[r]) alone.

    SplitMix64 (Steele, Lea & Flood 2014), one stream per row; position t does not depend on ``length``.
    """
    seed = np.array([value & (2**64 - 1) for value in seeds], dtype=np.uint64)
    index = np.array(indices, dtype=np.uint64)
    key = _mix(_mix(seed) + (index + np.uint64(1)) * _GAMMA)
    counter = np.arange(1, 2 * length + 1, dtype=np.uint64) * _GAMMA
    bits = _mix(key[:, None] + counter[None, :]) >> np.uint64(40)  # 24 bits: exact in float32, below 1
    values = bits.astype(np.float32) * np.float32(2**-24)
    return torch.from_numpy(values.reshape(len(seed), length, 2))


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Next token of each row, int64 [R], and its natural log-probability, float32 [R].

    ``logits`` [R, V], ``uniform`` float32 [R, 2]. Log-probabilities are of the distribution that was
    sampled from: after temperature, top-k and top-p, in that order. A greedy answer (temperature 0)
    has none, so there they are of the model's own distribution, at temperature 1.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    logp = _truncate(logits, sampling).log_softmax(-1)
    tokens = _invert(logp.exp(), uniform)
    return tokens, logp.gather(-1, tokens[:, None])[:, 0]


def _truncate(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits with what top-k and top-p exclude at minus infinity; a tie with the last one kept stays."""
    vocabulary = logits.shape[-1]
    if 0 < sampling.top_k < vocabulary:
        least = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        p = ordered.softmax(-1)
        before = p.cumsum(-1) - p  # mass of all that is likelier
        excluded = torch.zeros_like(before, dtype=torch.bool).scatter_(-1, order, before >= sampling.top_p)
        excluded.scatter_(-1, order[:, :1], False)
        logits = logits.masked_fill(excluded, -math.inf)
    return logits


def _invert(p: Tensor, uniform: Tensor) -> Tensor:
    """Inverse CDF in two levels: p float32 [R, V], uniform [R, 2] -> int64 [R]."""
    rows, vocabulary = p.shape
    width = vocabulary if vocabulary <= FLAT_VOCABULARY else math.isqrt(vocabulary - 1) + 1
    missing = -vocabulary % width
    blocks = (
        torch.nn.functional.pad(p, (0, missing)).view(rows, -1, width) if missing else p.view(rows, -1, width)
    )
    block = _first_above(blocks.sum(-1), uniform[:, :1])
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, width))[:, 0]
    return (block * width + _first_above(inside, uniform[:, 1:]))[:, 0]


def _first_above(weights: Tensor, uniform: Tensor) -> Tensor:
    """First place where the running sum exceeds uniform x total: [R, W], [R, 1] -> int64 [R, 1].

    uniform <= 1 - 2^-24 keeps the product below the total, so the place exists and its weight is not 0.
    """
    running = weights.cumsum(-1)
    return torch.searchsorted(running, uniform * running[:, -1:], right=True).clamp_(
        max=weights.shape[-1] - 1
    )


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
