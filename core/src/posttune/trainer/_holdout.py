"""Preference pairs that are held out: which rows, and how well the model ranks them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from posttune.config.models import PackingConfig
from posttune.data.dataset import SampleDataset
from posttune.data.sampler import PositionSampler
from posttune.distributed.ranks import Ranks
from posttune.errors import DataError
from posttune.files import atomic_write_text
from posttune.trainer._pairs import agreement, bradley_terry, margins, pair_batches, read_pairs

CHUNK = 256  # pairs in memory at a time


@dataclass(frozen=True)
class Split:
    """Rows of a dataset by index, each in one of the two; both in ascending order."""

    trained: list[int]
    held_out: list[int]


def split(dataset: SampleDataset, size: int, fraction: float, seed: int) -> Split:
    """Hold out about ``fraction`` of the first ``size`` rows (at least one), whole prompts at a time.

    The prompts are taken in an order that follows from ``seed`` alone, so that no prompt is on both
    sides. Raises `DataError` where all rows have one prompt.
    """
    if fraction == 0:
        return Split(list(range(size)), [])
    prompt = _prompts(dataset)[:size]
    rows_of = np.bincount(prompt)
    order = PositionSampler(len(rows_of), seed).indices(0, len(rows_of))
    target = max(1, round(fraction * size))
    before = np.concatenate([[0], np.cumsum(rows_of[order])[:-1]])
    chosen = [number for number, rows in zip(order, before, strict=True) if rows < target][: len(order) - 1]
    out = np.isin(prompt, chosen)
    if not out.any():
        what = f"all {size} rows have the same prompt, so none can be held out"
        fix = "give holdout.data, or set holdout.fraction to 0"
        raise DataError(what, who=str(dataset.folder), fix=fix)
    return Split(np.flatnonzero(~out).tolist(), np.flatnonzero(out).tolist())


def _prompts(dataset: SampleDataset) -> NDArray[np.int64]:
    """A number for each row that is the same for the same prompt: 0, 1, … by first appearance."""
    texts = [pc.coalesce(batch["messages"], batch["prompt"], "") for batch in dataset.batches()]
    encoded = pa.chunked_array(texts).dictionary_encode().unify_dictionaries()
    return np.concatenate([chunk.indices.to_numpy(False) for chunk in encoded.chunks]).astype(np.int64)


def record(found: Split, path: Path, *, seed: int, fraction: float, fingerprint: str) -> None:
    """Write down which rows of which dataset were held out, as JSON."""
    about = {"dataset": fingerprint, "seed": seed, "fraction": fraction, "trained": len(found.trained)}
    atomic_write_text(path, json.dumps({**about, "held_out": found.held_out}) + "\n")


@dataclass(frozen=True)
class HeldOut:
    """Ranks the held-out pairs every so many steps, and after the last. Every rank scores its share."""

    model: torch.nn.Module
    dataset: SampleDataset
    rows: list[int]
    every: int | None
    total_steps: int
    packing: PackingConfig
    ranks: Ranks

    def due(self, step: int) -> bool:
        """Whether an evaluation follows step ``step`` (from 1)."""
        return step == self.total_steps or (self.every is not None and step % self.every == 0)

    def reached(self, metrics: Mapping[str, float]) -> bool:  # noqa: ARG002
        """Never: the stage runs to its end."""
        return False

    @torch.no_grad()
    def run(self) -> dict[str, float]:
        """``val/loss`` (nats), ``val/accuracy`` and ``val/margin``: means over the pairs of all ranks."""
        began = time.perf_counter()
        self.model.eval()
        sums = torch.zeros(4, dtype=torch.float64, device=self.ranks.device)
        mine = self.ranks.share(self.rows)
        for start in range(0, self.ranks.longest_share(len(self.rows)), CHUNK):
            pairs = read_pairs(self.dataset, mine[start : start + CHUNK])
            for batch in pair_batches(pairs, self.packing, self.ranks):
                margin = margins(self.model, batch).double()
                parts = (bradley_terry(margin), agreement(margin), margin, torch.ones_like(margin))
                sums += torch.stack([part.sum() for part in parts])
        loss, correct, margin_sum, count = self.ranks.sum(sums).tolist()
        seconds = {"time/validation_s": time.perf_counter() - began}
        if count == 0:
            return seconds
        means = {"loss": loss / count, "accuracy": correct / count, "margin": margin_sum / count}
        return {**{f"val/{name}": value for name, value in means.items()}, "val/pairs": count, **seconds}
