"""How a step's samples are cut into the parts that one optimiser step each is taken on."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from posttune import _segments as segments
from posttune.config.models import CriticConfig, RlBatchConfig
from posttune.distributed.ranks import Ranks
from posttune.rollout.requests import derive_seed
from posttune.trainer._batch import RolloutBatch
from posttune.types import Totals


@dataclass(frozen=True)
class Knobs:
    """What differs from step to step."""

    step: int
    groups: Sequence[Hashable]  # the step's prompts over all ranks, in order
    lr: float
    kl_coef: float
    policy_learns: bool = True  # not while a critic warms up


@dataclass(frozen=True)
class Passes:
    """Passes over a step's samples, each in parts of whole prompts."""

    epochs: int
    mini_batches: int
    longest: int  # tokens that a response may have
    seed: int
    ranks: Ranks

    @classmethod
    def of(cls, config: RlBatchConfig, longest: int, seed: int, ranks: Ranks) -> Passes:
        """The policy's."""
        return cls(config.epochs, config.mini_batches, longest, seed, ranks)

    def for_critic(self, config: CriticConfig) -> Passes:
        """The critic's: the policy's, unless it says otherwise."""
        return replace(
            self,
            epochs=config.epochs or self.epochs,
            mini_batches=config.mini_batches or self.mini_batches,
        )

    def parts(self, knobs: Knobs, epoch: int) -> Iterator[set[Hashable]]:
        """The prompts in an order that (seed, step, epoch) gives, cut into equal parts, none empty."""
        seed = derive_seed(self.seed, "mini-batches", knobs.step, epoch)
        order = torch.randperm(len(knobs.groups), generator=torch.Generator().manual_seed(seed)).tolist()
        count = min(self.mini_batches, len(order))
        for part in range(count):
            start, end = len(order) * part // count, len(order) * (part + 1) // count
            yield {knobs.groups[place] for place in order[start:end]}

    def numbers(self, knobs: Knobs) -> dict[Hashable, int]:
        """The part of the first pass that each prompt is in."""
        parts = enumerate(self.parts(knobs, epoch=0))
        return {group: number for number, chosen in parts for group in chosen}

    def members(self, batch: RolloutBatch, chosen: set[Hashable]) -> list[int]:
        """The trainable sequences of the prompts ``chosen``."""
        return [row for row in batch.trainable() if batch.packed.group[row] in chosen]

    def totals(self, batch: RolloutBatch, members: Sequence[int]) -> Totals:
        """Counts of these sequences over all ranks."""
        tokens = segments.token_counts(batch.packed)[list(members)].sum()
        local = torch.tensor([int(tokens), len(members)], dtype=torch.float64)
        counts = self.ranks.sum(local).tolist()
        return Totals(tokens=int(counts[0]), sequences=int(counts[1]), max_length=self.longest)
