"""The stream of prompts: which rows a step answers, and with which seeds."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from posttune.data.dataset import SampleDataset
from posttune.data.sampler import PositionSampler
from posttune.distributed.ranks import Ranks
from posttune.rollout.requests import make_requests
from posttune.types import Request


@dataclass(frozen=True)
class Prompts:
    """The prompts of a step: this rank's rows and requests, and the ids of all ranks' in order."""

    rows: list[Mapping[str, Any]]
    requests: list[Request]
    all_ids: list[str]
    origins: list[str]  # file and row of each of this rank's rows
    taken: int = 0  # rows of the stream, over all ranks

    def joined(self, other: Prompts) -> Prompts:
        """Both, one behind the other."""
        return Prompts(
            self.rows + other.rows,
            self.requests + other.requests,
            self.all_ids + other.all_ids,
            self.origins + other.origins,
            self.taken + other.taken,
        )

    def only(self, ids: Collection[Hashable], all_ids: list[str]) -> Prompts:
        """Those with the ids; ``all_ids`` are those of all ranks."""
        kept = [number for number, request in enumerate(self.requests) if request.id in ids]
        rows, origins = [self.rows[each] for each in kept], [self.origins[each] for each in kept]
        return Prompts(rows, [self.requests[each] for each in kept], all_ids, origins, self.taken)


@dataclass(frozen=True)
class PromptStream:
    """Rows of a dataset by position, ``count`` a step over all ranks.

    A request is known by its position in the stream, so a prompt that comes again in a later epoch
    is another request with another seed.
    """

    dataset: SampleDataset
    sampler: PositionSampler
    count: int
    seed: int
    ranks: Ranks

    def take(self, position: int, count: int | None = None) -> Prompts:
        """The prompts from ``position`` on: those of a step, or ``count`` of them."""
        taken = self.count if count is None else count
        ids = [str(position + number) for number in range(taken)]
        indices = self.ranks.share(self.sampler.indices(position, taken))
        rows: list[Mapping[str, Any]] = [self.dataset[index] for index in indices]
        prompts = [row["prompt_ids"] for row in rows]
        requests = make_requests(self.ranks.share(ids), prompts, seed=self.seed)
        return Prompts(rows, requests, ids, [self.dataset.origin(index) for index in indices], taken)
