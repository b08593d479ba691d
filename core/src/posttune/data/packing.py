"""Sequences share rows, rows share a forward pass, and nothing leaks or moves.

A row holds whole sequences one behind the other; ``position_ids`` restart with each. With
``attention_mask=None`` and ``use_cache=False`` transformers isolates them (its default leaks).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import torch

from posttune.data.partition import fill, row_length_for
from posttune.types import Packed


@dataclass(frozen=True)
class TokenSequence:
    """A sequence to train on: the tokens from ``response_start`` on are predicted."""

    ids: Sequence[int]
    response_start: int  # at least 1: the first token has nothing before it that predicts it
    response_mask: Sequence[bool] | None = None  # one a response token; None: all count
    group: Hashable = None

    def __post_init__(self) -> None:
        if not 1 <= self.response_start <= len(self.ids):
            raise ValueError(
                f"response_start {self.response_start} is not in 1 .. {len(self.ids)}, the number of tokens"
            )
        if self.response_mask is not None and len(self.response_mask) != self.response_length:
            raise ValueError(
                f"the response mask has {len(self.response_mask)} entries for {self.response_length} tokens"
            )

    @property
    def response_length(self) -> int:
        return len(self.ids) - self.response_start

    @classmethod
    def from_mask(
        cls, ids: Sequence[int], loss_mask: Sequence[bool], group: Hashable = None
    ) -> TokenSequence:
        """From a row of a dataset. What follows the last trained token is dropped: it changes no loss."""
        if len(ids) != len(loss_mask):
            raise ValueError(f"the loss mask has {len(loss_mask)} entries for {len(ids)} tokens")
        trained = np.flatnonzero(loss_mask)
        if not len(trained):
            return cls(ids, len(ids), (), group)
        start, end = int(trained[0]), int(trained[-1]) + 1
        return cls(ids[:end], start, loss_mask[start:end], group)


@dataclass(frozen=True)
class MicroPlan:
    """One forward pass: which sequences share which row."""

    rows: list[list[int]]  # indices of sequences
    row_length: int

    @property
    def order(self) -> list[int]:
        """The sequences of this micro-batch, in the order of its packed tensors."""
        return list(chain.from_iterable(self.rows))

    @property
    def tokens(self) -> int:
        """Tokens that are computed, padding included."""
        return len(self.rows) * self.row_length


@dataclass(frozen=True)
class PackingStats:
    """What a plan wastes."""

    padding_fraction: float  # of the computed tokens
    tokens_per_row: float  # that belong to sequences
    attention_waste: float  # sum of squared row lengths / sum of squared sequence lengths


@dataclass(frozen=True)
class ModelBatch:
    """A micro-batch of R rows of T tokens with N response tokens of S sequences."""

    input_ids: torch.Tensor  # int64 [R, T]
    position_ids: torch.Tensor  # int64 [R, T]; restart per sequence, 0 for padding
    predict: torch.Tensor  # int64 [N]; places in R * T whose logits predict the response tokens
    targets: torch.Tensor  # int64 [N]; the response tokens
    packed: Packed  # of the S sequences, in ``order``
    order: tuple[int, ...]  # indices of the sequences


def plan(
    lengths: Sequence[int], *, micro_batch_tokens: int, row_tokens: int | None = None
) -> list[MicroPlan]:
    """Place every sequence once. Deterministic.

    ``micro_batch_tokens`` bounds rows x row length of a micro-batch, ``row_tokens`` a row; without it
    the row length follows from the lengths. A sequence that is longer than either gets a micro-batch
    of its own rather than an error: a rollout cannot be unmade.
    """
    if any(length < 1 for length in lengths):
        raise ValueError("a sequence of no tokens cannot be packed")
    limit = min(row_tokens or micro_batch_tokens, micro_batch_tokens)
    alone = [MicroPlan([[i]], length) for i, length in enumerate(lengths) if length > limit]
    fitting = [i for i, length in enumerate(lengths) if length <= limit]
    if not fitting:
        return alone
    capacity = (
        limit if row_tokens else row_length_for([lengths[i] for i in fitting], limit, micro_batch_tokens)
    )
    rows = _rows(lengths, fitting, capacity)
    return alone + _micro_batches(rows, lengths, max(1, micro_batch_tokens // capacity))


def collate(
    sequences: Sequence[TokenSequence], micro: MicroPlan, device: torch.device | str = "cpu"
) -> ModelBatch:
    """Make the tensors of one micro-batch; ``sequences`` are all those that were planned."""
    size = (len(micro.rows), micro.row_length)
    input_ids = np.zeros(size, dtype=np.int64)  # padding is token 0: any valid id serves, nothing sees it
    position_ids = np.zeros(size, dtype=np.int64)
    predict: list[np.ndarray] = []
    for number, row in enumerate(micro.rows):
        offset = 0
        for index in row:
            sequence = sequences[index]
            end = offset + len(sequence.ids)
            input_ids[number, offset:end] = sequence.ids
            position_ids[number, offset:end] = np.arange(end - offset)
            first = number * micro.row_length + offset + sequence.response_start - 1
            predict.append(np.arange(first, first + sequence.response_length))
            offset = end
    places = np.concatenate(predict)
    chosen = [sequences[index] for index in micro.order]
    return ModelBatch(
        input_ids=torch.from_numpy(input_ids).to(device),
        position_ids=torch.from_numpy(position_ids).to(device),
        predict=torch.from_numpy(places).to(device),
        targets=torch.from_numpy(input_ids.reshape(-1)[places + 1]).to(device),
        packed=pack(chosen, device),
        order=tuple(micro.order),
    )


def pack(sequences: Sequence[TokenSequence], device: torch.device | str = "cpu") -> Packed:
    """Where the response tokens of these sequences lie, in their order."""
    lengths = [sequence.response_length for sequence in sequences]
    masks = [
        np.ones(sequence.response_length, dtype=bool)
        if sequence.response_mask is None
        else np.asarray(sequence.response_mask, dtype=bool)
        for sequence in sequences
    ]
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return Packed(
        cu_seqlens=torch.from_numpy(cu_seqlens).to(device),
        mask=torch.from_numpy(np.concatenate(masks) if masks else np.zeros(0, dtype=bool)).to(device),
        group=tuple(sequence.group for sequence in sequences),
    )


def token_index(cu_seqlens: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """int64 [n]: where the tokens of the sequences ``order`` lie in tensors packed over all sequences.

    ``values[token_index(packed.cu_seqlens, micro.order)]`` is what belongs to a micro-batch.
    """
    chosen = torch.as_tensor(order, dtype=torch.int64, device=cu_seqlens.device)
    starts = cu_seqlens.to(torch.int64)[chosen]
    lengths = cu_seqlens.to(torch.int64)[chosen + 1] - starts
    ends = lengths.cumsum(0)
    shift = torch.repeat_interleave(starts - (ends - lengths), lengths)
    return shift + torch.arange(len(shift), device=cu_seqlens.device)


def restore(
    parts: Sequence[torch.Tensor], plans: Sequence[MicroPlan], cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """Join the per-token results of the micro-batches in the order of the sequences: [N]."""
    index = torch.cat([token_index(cu_seqlens, micro.order) for micro in plans])
    joined = torch.cat(list(parts))
    return torch.empty_like(joined).index_copy(0, index, joined)


def stats(plans: Sequence[MicroPlan], lengths: Sequence[int]) -> PackingStats:
    """What the plans waste on sequences of these lengths."""
    rows = sum(len(micro.rows) for micro in plans)
    computed = sum(micro.tokens for micro in plans)
    if not computed:
        return PackingStats(0.0, 0.0, 1.0)
    squares = sum(len(micro.rows) * micro.row_length**2 for micro in plans)
    return PackingStats(
        padding_fraction=1 - sum(lengths) / computed,
        tokens_per_row=sum(lengths) / rows,
        attention_waste=squares / sum(length * length for length in lengths),
    )


def _rows(lengths: Sequence[int], indices: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of at most ``capacity`` tokens, fullest first."""
    pools: dict[int, list[int]] = {}
    for index in reversed(indices):
        pools.setdefault(lengths[index], []).append(index)
    filling = fill(Counter(lengths[index] for index in indices), capacity)
    patterns = sorted(filling.patterns, key=lambda entry: -sum(entry[0]))
    return [[pools[length].pop() for length in pattern] for pattern, times in patterns for _ in range(times)]


def _micro_batches(rows: list[list[int]], lengths: Sequence[int], rows_each: int) -> list[MicroPlan]:
    """Equal numbers of rows per micro-batch, so that none is a small rest."""
    count = -(-len(rows) // rows_each)
    bounds = [len(rows) * part // count for part in range(count + 1)]
    shares = [rows[start:end] for start, end in pairwise(bounds)]
    return [MicroPlan(share, max(sum(lengths[i] for i in row) for row in share)) for share in shares]
