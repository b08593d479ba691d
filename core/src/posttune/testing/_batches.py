"""Random packed batches, and what the suites do to them: reorder, cut, pad, spread over ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from posttune import _segments as segments
from posttune.types import AdvantageBatch, LossBatch, Packed

T = TypeVar("T")


def one_rank(part: Tensor) -> Tensor:
    """The reduction of a single rank."""
    return part


def packed(lengths: Sequence[int], groups: Sequence[Hashable], mask: Tensor | None = None) -> Packed:
    """Sequences of the given lengths; every token is the policy's where no mask is given."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    everything = torch.ones(int(ends[-1]), dtype=torch.bool)
    return Packed(ends.int(), everything if mask is None else mask, tuple(groups))


def random_packed(generator: torch.Generator, groups: int = 4, size: int = 4, longest: int = 7) -> Packed:
    """Groups of equal size, shuffled; ragged lengths; holes, but never as a sequence's last token."""
    count = groups * size
    ids = [f"prompt {place % groups}" for place in torch.randperm(count, generator=generator).tolist()]
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    mask = torch.rand(sum(lengths), generator=generator) > 0.25
    mask[torch.tensor(lengths).cumsum(0) - 1] = True
    return packed(lengths, ids, mask)


def random_advantage_batch(seed: int) -> AdvantageBatch:
    """With everything that an estimator may ask for: a critic's values, greedy baselines, dimensions."""
    generator = torch.Generator().manual_seed(seed)
    layout = random_packed(generator)
    tokens, count = len(layout.mask), len(layout.group)

    def draw(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    token_rewards = torch.where(layout.mask, draw(tokens), 0.0)
    return AdvantageBatch(
        packed=layout,
        token_rewards=token_rewards,
        scores=segments.masked_sums(token_rewards, layout),
        dims={"first": draw(count), "second": 3 * draw(count)},
        values=draw(tokens).float(),
        baselines=draw(count),
        reduce=one_rank,
    )


def random_loss_batch(seed: int, *, on_policy: bool = False) -> LossBatch:
    """Off-policy enough that clips are active; one advantage a sequence."""
    generator = torch.Generator().manual_seed(seed)
    layout = random_packed(generator)
    tokens = len(layout.mask)
    old_logp = -torch.rand(tokens, generator=generator) * 3 - 0.05
    shift = 0.0 if on_policy else 0.4 * torch.randn(tokens, generator=generator)
    advantages = segments.spread(torch.randn(len(layout.group), generator=generator), layout)
    return LossBatch(
        packed=layout,
        logp=(old_logp + shift).clamp(max=-0.01),
        old_logp=old_logp,
        rollout_logp=None,
        advantages=torch.where(layout.mask, advantages, 0.0),
    )


@dataclass(frozen=True)
class Places:
    """Tokens of a new batch in terms of an old one: ``tokens[i]`` is where new token i was."""

    sequences: Tensor  # int64
    tokens: Tensor  # int64


def places_of(layout: Packed, sequences: Sequence[int]) -> Places:
    """The tokens of the given sequences, in that order."""
    bounds = layout.cu_seqlens.tolist()
    tokens = [place for each in sequences for place in range(bounds[each], bounds[each + 1])]
    return Places(torch.tensor(list(sequences), dtype=torch.long), torch.tensor(tokens, dtype=torch.long))


def pick_packed(layout: Packed, places: Places) -> Packed:
    """The layout of the chosen sequences."""
    lengths = segments.lengths(layout.cu_seqlens)[places.sequences].tolist()
    ids = [layout.group[each] for each in places.sequences.tolist()]
    return packed(lengths, ids, layout.mask[places.tokens])


def pick_advantage(batch: AdvantageBatch, places: Places) -> AdvantageBatch:
    """The batch of the chosen sequences."""
    return replace(
        batch,
        packed=pick_packed(batch.packed, places),
        token_rewards=batch.token_rewards[places.tokens],
        scores=batch.scores[places.sequences],
        dims={name: values[places.sequences] for name, values in batch.dims.items()},
        values=None if batch.values is None else batch.values[places.tokens],
        baselines=None if batch.baselines is None else batch.baselines[places.sequences],
    )


def pick_loss(batch: LossBatch, places: Places) -> LossBatch:
    """The batch of the chosen sequences. ``logp`` keeps its gradient."""
    return replace(
        batch,
        packed=pick_packed(batch.packed, places),
        logp=batch.logp[places.tokens],
        old_logp=batch.old_logp[places.tokens],
        advantages=batch.advantages[places.tokens],
    )


def padded(layout: Packed, before: int, after: int) -> tuple[Packed, Tensor]:
    """The same sequences with masked tokens around each, and where the old tokens are now."""
    lengths = segments.lengths(layout.cu_seqlens)
    extra = (before + after) * segments.sequence_index(layout.cu_seqlens)
    now = torch.arange(len(layout.mask)) + extra + before
    mask = torch.zeros(len(layout.mask) + (before + after) * len(lengths), dtype=torch.bool)
    mask[now] = layout.mask
    return packed((lengths + before + after).tolist(), layout.group, mask), now


def widen(values: Tensor, now: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """Per-token values in a padded layout."""
    return values.new_full((size,), fill).index_put((now,), values)


def halves(layout: Packed) -> tuple[list[int], list[int]]:
    """The sequences of the first half of the groups, and the others: no group is split."""
    names = list(dict.fromkeys(layout.group))
    first = set(names[: len(names) // 2])
    inside = [place for place, name in enumerate(layout.group) if name in first]
    return inside, [place for place, name in enumerate(layout.group) if name not in first]


class Ring:
    """Sums tensors over threads that stand for ranks. Fails after a minute, should one rank not call."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self.parts: list[Tensor | None] = [None] * ranks

    def reduction(self, rank: int) -> Callable[[Tensor], Tensor]:
        """The ``reduce`` of one rank."""

        def reduce(part: Tensor) -> Tensor:
            self.parts[rank] = part
            self.barrier.wait(60)
            total = torch.stack([each for each in self.parts if each is not None]).sum(0)
            self.barrier.wait(60)
            return total

        return reduce


def on_ranks(work: Sequence[Callable[[Callable[[Tensor], Tensor]], T]]) -> list[T]:
    """Run one function per rank, each with its ``reduce``; the results in order. Raises what one raised."""
    ring = Ring(len(work))

    def run(rank: int) -> T:
        try:
            return work[rank](ring.reduction(rank))
        except BaseException:
            ring.barrier.abort()  # the other ranks would wait
            raise

    with ThreadPoolExecutor(len(work)) as pool:
        futures = [pool.submit(run, rank) for rank in range(len(work))]
    errors = [error for future in futures if (error := future.exception())]
    if errors:
        raise next((each for each in errors if not isinstance(each, threading.BrokenBarrierError)), errors[0])
    return [future.result() for future in futures]


def micro_batches(count: int, size: int) -> Iterator[list[int]]:
    """Consecutive sequences, ``size`` at a time."""
    for start in range(0, count, size):
        yield list(range(start, min(start + size, count)))
