"""The stream of prompts: which rows a step answers, and with which seeds."""

from __future__ import annotations

from collections.abc import Mapping
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

    def take(self, position: int) -> Prompts:
        """The prompts from ``position`` on."""
        ids = [str(position + number) for number in range(self.count)]
        indices = self.ranks.share(self.sampler.indices(position, self.count))
        rows: list[Mapping[str, Any]] = [self.dataset[index] for index in indices]
        prompts = [row["prompt_ids"] for row in rows]
        return Prompts(rows, make_requests(self.ranks.share(ids), prompts, seed=self.seed), ids)
