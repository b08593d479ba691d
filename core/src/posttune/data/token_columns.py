"""The token columns of many rows at once: what `Encoder` puts together row by row, in arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from posttune.data.columns import nothing, numbers
from posttune.data.piecewise import FlatIds

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenColumns:
    """``prompt`` and ``total`` (int64 [rows]) are how many tokens the prompt and the whole have."""

    arrays: dict[str, pa.Array]  # by token column
    prompt: NDArray[np.int64]
    total: NDArray[np.int64]


@dataclass(frozen=True)
class Frame:
    """What stands around the texts: a tokenizer's special tokens."""

    prefix: Sequence[int]
    bos: int | None
    eos: int


def token_columns(prompt: FlatIds, response: FlatIds | None, frame: Frame) -> TokenColumns | None:
    """Prefix, prompt, response and EOS of every row; ``prompt`` has no token where all is trained.

    None where a row needs a closer look: one with a BOS of its own, or without a token to train.
    """
    start, rows = len(frame.prefix), len(prompt.sizes)
    whole = np.full(rows, start, np.int64) + prompt.sizes
    known = whole.copy()
    if response is not None:
        if not response.sizes.all():
            return None
        closed = response.ids[np.cumsum(response.sizes) - 1] == frame.eos
        whole += response.sizes + ~closed
    first = prompt if prompt.sizes.any() else response
    if first is None or not first.sizes.all() or (whole < 2).any():
        return None
    if frame.bos is not None and (first.ids[np.cumsum(first.sizes) - first.sizes] == frame.bos).any():
        return None
    ends = np.cumsum(whole)
    begins = ends - whole
    ids = np.full(ends[-1], frame.eos, np.int32)
    for place, token in enumerate(frame.prefix):
        ids[begins + place] = token
    ids[_places(begins + start, prompt.sizes)] = prompt.ids
    if response is not None:
        ids[_places(begins + known, response.sizes)] = response.ids
    trained = np.zeros(len(ids), np.bool_)
    if response is not None:
        trained[_places(begins + known, whole - known)] = True
        trained[begins] = False  # nothing stands before the first token that could predict it
    asked = ids if response is None else ids[_places(begins, known)]
    arrays = {
        "prompt_ids": _lists(numbers(asked, pa.int32()), known),
        "input_ids": _lists(numbers(ids, pa.int32()), whole),
        "loss_mask": _lists(_bits(trained), whole),
        "rejected_ids": nothing(rows, pa.int32()),
    }
    return TokenColumns(arrays, known, whole)


def _places(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """``starts[i]``, ``starts[i] + 1`` and so on, ``sizes[i]`` of them, for each i."""
    ends = np.cumsum(sizes)
    return np.arange(ends[-1]) + np.repeat(starts - ends + sizes, sizes)


def _lists(values: pa.Array, sizes: NDArray[np.int64]) -> pa.ListArray:
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return pa.ListArray.from_arrays(numbers(ends, pa.int32()), values)


def _bits(values: NDArray[Any]) -> pa.BooleanArray:
    packed = np.packbits(values, bitorder="little")
    return pa.BooleanArray.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(packed)])
