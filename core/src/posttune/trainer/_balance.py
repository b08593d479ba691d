"""Sequences change places between processes, so that each trains on about as many tokens as the others.

Only once their advantages are known: what the update leaves out then moves nowhere and weighs nothing,
and the answers to one prompt need no longer lie together.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttune.data.packing import TokenSequence, pack, token_index
from posttune.data.partition import balance
from posttune.distributed.ranks import Ranks
from posttune.trainer._batch import RolloutBatch
from posttune.trainer.metrics import Meter

COLUMNS = ("rollout_logp", "advantages", "old_logp", "ref_logp", "values", "returns", "entropy")
Sizes = Sequence[Sequence[tuple[int, int]]]
"""By share, each of its sequences: the part that it is trained in, and its tokens, prompt included."""


@dataclass(frozen=True)
class Parcel:
    """S sequences with n response tokens on their way to another process, and what is known of them."""

    sequences: list[TokenSequence]
    scored: list[bool]  # S
    fresh: list[bool]  # S
    columns: dict[str, np.ndarray]  # float32 [n] each


def evened(
    batch: RolloutBatch, rows: Sequence[int], parts: Mapping[Hashable, int], ranks: Ranks, meter: Meter
) -> RolloutBatch:
    """The batch that this process trains on. Of the sequences ``rows`` all have about as many tokens.

    ``parts`` says of every prompt in which optimiser step of an epoch it is: each of them is even. Other
    sequences stay where they are. Every process calls it; the batches of all hold each sequence once.
    """
    own = [(parts[batch.packed.group[row]], len(batch.sequences[row].ids)) for row in rows]
    sizes = ranks.all_objects(own)
    takers = assign(sizes)
    meter.peak("rollout/rank_imbalance", imbalance(sizes, [[i] * len(each) for i, each in enumerate(sizes)]))
    meter.peak("update/rank_imbalance", imbalance(sizes, takers))
    going: list[list[int]] = [[] for _ in sizes]
    taker_of = dict(zip(rows, takers[ranks.data_rank], strict=True))
    for row in range(len(batch.sequences)):
        going[taker_of.get(row, ranks.data_rank)].append(row)
    return _joined(batch, ranks.exchanged([_parcel(batch, each) for each in going]))


def assign(sizes: Sizes) -> list[list[int]]:
    """The share that takes each sequence, part by part: the fullest portion goes where least is yet."""
    takers = [[0] * len(each) for each in sizes]
    loads = [0] * len(sizes)
    members: dict[int, list[tuple[int, int]]] = {}
    for share, each in enumerate(sizes):
        for number, (part, _) in enumerate(each):
            members.setdefault(part, []).append((share, number))
    for _, places in sorted(members.items()):
        tokens = [sizes[share][number][1] for share, number in places]
        portions = balance(tokens, len(sizes))
        portions.sort(key=lambda portion: -sum(tokens[i] for i in portion))
        emptiest = sorted(range(len(sizes)), key=loads.__getitem__)
        for portion, taker in zip(portions, emptiest, strict=True):
            loads[taker] += sum(tokens[i] for i in portion)
            for share, number in (places[i] for i in portion):
                takers[share][number] = taker
    return takers


def imbalance(sizes: Sizes, takers: Sequence[Sequence[int]]) -> float:
    """Tokens of the fullest share by the mean of all shares, summed over the parts; 1 without any."""
    loads: dict[int, list[int]] = {}
    for (part, tokens), taker in zip(chain(*sizes), chain(*takers), strict=True):
        loads.setdefault(part, [0] * len(sizes))[taker] += tokens
    total = sum(map(sum, loads.values()))
    return sum(map(max, loads.values())) * len(sizes) / total if total else 1.0


def _parcel(batch: RolloutBatch, rows: Sequence[int]) -> Parcel:
    index = token_index(batch.packed.cu_seqlens, rows)
    found = {name: getattr(batch, name) for name in COLUMNS}
    return Parcel(
        [replace(batch.sequences[row], ids=array("i", batch.sequences[row].ids)) for row in rows],
        batch.scored[list(rows)].tolist(),
        [row in batch.fresh for row in rows],
        {name: values[index].cpu().numpy() for name, values in found.items() if values is not None},
    )


def _joined(batch: RolloutBatch, parcels: Sequence[Parcel]) -> RolloutBatch:
    """The batch of these sequences. What one of them lacks is None; a parcel of none lacks nothing."""
    device = batch.scored.device
    sequences = [each for parcel in parcels for each in parcel.sequences]
    filled = [parcel for parcel in parcels if parcel.sequences] or parcels

    def column(name: str) -> Tensor | None:
        known = [parcel.columns[name] for parcel in filled if name in parcel.columns]
        return torch.from_numpy(np.concatenate(known)).to(device) if len(known) == len(filled) else None

    columns: dict[str, Any] = {name: column(name) for name in COLUMNS}
    scored = [each for parcel in parcels for each in parcel.scored]
    fresh = {row for row, each in enumerate(chain(*(parcel.fresh for parcel in parcels))) if each}
    return RolloutBatch(
        sequences,
        pack(sequences, device),
        scored=torch.tensor(scored, dtype=torch.bool, device=device),
        fresh=fresh,
        **columns,
    )
