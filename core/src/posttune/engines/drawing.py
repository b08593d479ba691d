"""Drawing tokens: streams of uniforms that belong to a sample, truncation, and the inverse of a distribution.

A completion must not depend on what shares its batch. So the randomness of sample ``i`` of a
request is a function of (seed, i, position) alone, and tokens come from it by the inverse of the
cumulative distribution. Rounding differs between batch shapes by about 1e-7; a flat search over a
large vocabulary would let that move a boundary past its neighbours in the tail, so the search has
two levels (a block, then a token in it), each with a uniform of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

FLAT_VOCABULARY = 1024  # up to here one block holds all tokens
UNIT = 2**-24  # 24 bits: exact in float32, and below 1

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def stream_keys(seeds: Sequence[int], indices: Sequence[int]) -> npt.NDArray[np.uint64]:
    """The stream of sample ``indices[r]`` of a request with ``seeds[r]``: one number each.

    A stream is SplitMix64 (Steele, Lea & Flood 2014) from its key.
    """
    seed = np.array([value & (2**64 - 1) for value in seeds], dtype=np.uint64)
    index = np.array(indices, dtype=np.uint64)
    return _mix(_mix(seed) + (index + np.uint64(1)) * _GAMMA)


def uniforms(seeds: Sequence[int], indices: Sequence[int], length: int) -> Tensor:
    """Uniforms in [0, 1): float32 [rows, length, 2], row r from (seeds[r], indices[r]) alone.

    Position t does not depend on ``length``.
    """
    import torch

    key = stream_keys(seeds, indices)
    counter = np.arange(1, 2 * length + 1, dtype=np.uint64) * _GAMMA
    bits = _mix(key[:, None] + counter[None, :]) >> np.uint64(40)
    values = bits.astype(np.float32) * np.float32(UNIT)
    return torch.from_numpy(values.reshape(len(key), length, 2))


def uniforms_at(keys: Tensor, positions: Tensor) -> Tensor:
    """Entry ``positions[r]`` of the stream ``keys[r]``, on their device: int64 [R] twice -> float32 [R, 2].

    The same numbers as ``uniforms``. Keys are the bits of ``stream_keys`` as int64.
    """
    counter = 2 * positions[:, None] + positions.new_tensor([[1, 2]])
    x = keys[:, None] + counter * _signed(_GAMMA)
    x = (x ^ _shifted(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shifted(x, 27)) * _signed(_MIX_2)
    x = x ^ _shifted(x, 31)
    return _shifted(x, 40).float() * UNIT


def truncate(logits: Tensor, top_k: int | Tensor, top_p: float | Tensor) -> Tensor:
    """Logits [R, V] with what top-k and top-p exclude at minus infinity; a tie with the last one kept stays.

    ``top_k`` (0 or the vocabulary's size: off) and ``top_p`` (1: off) are numbers, or one a row: [R].
    """
    vocabulary = logits.shape[-1]
    if not isinstance(top_k, int):
        kept = top_k.long().clamp(1, vocabulary)[:, None]
        least = logits.sort(dim=-1, descending=True).values.gather(1, kept - 1)
        logits = logits.masked_fill(logits < least, -math.inf)
    elif 0 < top_k < vocabulary:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if isinstance(top_p, float | int):
        return logits if top_p >= 1 else _nucleus(logits, top_p)
    return _nucleus(logits, top_p[:, None])


def invert(p: Tensor, uniform: Tensor) -> Tensor:
    """Inverse CDF in two levels: p float32 [R, V], uniform [R, 2] -> int64 [R]."""
    import torch

    rows, vocabulary = p.shape
    width = vocabulary if vocabulary <= FLAT_VOCABULARY else math.isqrt(vocabulary - 1) + 1
    missing = -vocabulary % width
    blocks = (
        torch.nn.functional.pad(p, (0, missing)).view(rows, -1, width) if missing else p.view(rows, -1, width)
    )
    block = _first_above(blocks.sum(-1), uniform[:, :1])
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, width))[:, 0]
    return (block * width + _first_above(inside, uniform[:, 1:]))[:, 0]


def _nucleus(logits: Tensor, top_p: float | Tensor) -> Tensor:
    """The likeliest tokens until their mass reaches ``top_p``; the first one always."""
    import torch

    ordered, order = logits.sort(dim=-1, descending=True)
    p = ordered.softmax(-1)
    before = p.cumsum(-1) - p  # mass of all that is likelier
    beyond = before >= top_p if isinstance(top_p, float) else (before >= top_p) & (top_p < 1)
    excluded = torch.zeros_like(beyond).scatter_(-1, order, beyond)
    excluded.scatter_(-1, order[:, :1], False)
    return logits.masked_fill(excluded, -math.inf)


def _first_above(weights: Tensor, uniform: Tensor) -> Tensor:
    """First place where the running sum exceeds uniform x total: [R, W], [R, 1] -> int64 [R, 1].

    uniform <= 1 - 2^-24 keeps the product below the total, so the place exists and its weight is not 0.
    """
    import torch

    running = weights.cumsum(-1)
    return torch.searchsorted(running, uniform * running[:, -1:], right=True).clamp_(
        max=weights.shape[-1] - 1
    )


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def _signed(value: np.uint64) -> int:
    """The same 64 bits as a signed number."""
    return int(value.astype(np.int64))


def _shifted(x: Tensor, places: int) -> Tensor:
    """A right shift of int64 that fills with zeros, as of unsigned numbers."""
    return (x >> places) & ((1 << (64 - places)) - 1)
