"""Preference pairs: read from a dataset, packed side by side, and scored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from posttune.config.models import PackingConfig
from posttune.data.dataset import SampleDataset
from posttune.data.packing import MicroPlan, ModelBatch, TokenSequence, plan
from posttune.distributed.ranks import Ranks
from posttune.errors import DataError
from posttune.models.values import sequence_scores
from posttune.trainer._batch import in_step, note_packing
from posttune.trainer.metrics import Meter


@dataclass(frozen=True)
class Pair:
    """The token ids of the prompt with the better, and with the worse answer; each at least two."""

    chosen: Sequence[int]
    rejected: Sequence[int]


def check_pairs(dataset: SampleDataset) -> None:
    """Raise `DataError` where the (tokenised) dataset is no preference data."""
    lacking = dataset.missing("rejected_ids")
    if not lacking:
        return
    what = "is no preference data: it has no column rejected"
    if lacking < len(dataset):
        what = f"{lacking} of its {len(dataset)} rows have no rejected answer"
    fix = "convert data with the roles chosen and rejected (converter preference)"
    raise DataError(what, who=str(dataset.folder), fix=fix)


def read_pairs(dataset: SampleDataset, rows: Sequence[int]) -> list[Pair]:
    """The pairs of these rows. Those with two equal answers say nothing and are left out."""
    found = (_pair(dataset, row) for row in rows)
    return [pair for pair in found if pair.chosen != pair.rejected]


def _pair(dataset: SampleDataset, row: int) -> Pair:
    values = dataset[row]
    pair = Pair(values["input_ids"], values["rejected_ids"])
    if min(len(pair.chosen), len(pair.rejected)) < 2:
        place = dataset.location(row)
        raise DataError(
            "an answer of under two tokens, prompt included, cannot be scored",
            who=f"{place.file}:{place.row}",
            fix="raise max_length, or leave the row out",
        )
    return pair


def pair_batches(
    pairs: Sequence[Pair], packing: PackingConfig, ranks: Ranks, meter: Meter | None = None
) -> Iterator[ModelBatch]:
    """The pairs, packed; each once, its chosen sequence right before its rejected one.

    A pair is never split over forward passes, since its loss needs both scores. With a meter, what
    the packing wastes is noted.
    """
    sequences = [_scored(ids) for pair in pairs for ids in (pair.chosen, pair.rejected)]
    lengths = [len(pair.chosen) + len(pair.rejected) for pair in pairs]
    plans = plan(lengths, micro_batch_tokens=packing.micro_batch_tokens, row_tokens=packing.row_tokens)
    apart = [MicroPlan([_both(row) for row in micro.rows], micro.row_length) for micro in plans]
    if meter is not None:
        note_packing(meter, apart, [len(sequence.ids) for sequence in sequences])
    return in_step([(sequences, micro) for micro in apart], ranks)


def _scored(ids: Sequence[int]) -> TokenSequence:
    """A sequence whose last token is where its score is read."""
    return TokenSequence(ids, len(ids) - 1)


def _both(row: Sequence[int]) -> list[int]:
    return [place for pair in row for place in (2 * pair, 2 * pair + 1)]


def margins(model: torch.nn.Module, batch: ModelBatch) -> torch.Tensor:
    """Score of the chosen answer minus that of the rejected one, float32 [P], for a batch of P pairs."""
    scores = sequence_scores(model, batch).reshape(len(batch.order) // 2, 2)  # [P, 2]
    return scores[:, 0] - scores[:, 1]


def bradley_terry(margin: torch.Tensor) -> torch.Tensor:
    """-log sigmoid(r_chosen - r_rejected) of each pair, nats.

    The negative log-likelihood of the preference (Bradley and Terry 1952) with exp(r) as strengths; as
    a loss for reward models: Ouyang et al. 2022, arXiv:2203.02155, equation 1 with one pair a prompt.
    """
    return -functional.logsigmoid(margin)


def agreement(margin: torch.Tensor) -> torch.Tensor:
    """1 where the chosen answer scores higher, 1/2 where both score the same, else 0."""
    return 0.5 * (1.0 + margin.sign())
