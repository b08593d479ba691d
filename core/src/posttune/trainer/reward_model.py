"""Reward models: a scalar head that ranks answers, fitted to preferences (Bradley-Terry)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from posttune.config.models import ModelConfig, RewardModelStage
from posttune.data.dataset import SampleDataset
from posttune.data.sampler import PositionSampler
from posttune.distributed.sharding import cuts, place
from posttune.errors import DataError
from posttune.memory.apply import apply_memory
from posttune.memory.ledger import LEDGER
from posttune.models.load import LoadedModel
from posttune.models.load_scalar import load_reward_model
from posttune.rollout.requests import derive_seed
from posttune.run.stages import StageContext, StageResult
from posttune.trainer._batch import even_share
from posttune.trainer._holdout import HeldOut, Split, record, split
from posttune.trainer._inputs import Data, load_data
from posttune.trainer._pairs import (
    Pair,
    agreement,
    bradley_terry,
    check_pairs,
    margins,
    pair_batches,
    read_pairs,
)
from posttune.trainer._supervised import SupervisedWork
from posttune.trainer.checks import check_stage
from posttune.trainer.loop import Position
from posttune.trainer.metrics import Meter
from posttune.trainer.optimizer import make_stepper
from posttune.trainer.stage import Setup, train


@dataclass(frozen=True)
class Pairs:
    """This rank's pairs of a step, and their number over all ranks: what its means are over."""

    pairs: list[Pair]
    total: int


@dataclass
class RewardModelWork(SupervisedWork[RewardModelStage, Pairs]):
    """What a reward_model stage does in a step; its sampler draws from ``rows``."""

    rows: list[int]  # of the dataset, that are trained on

    def read(self, position: Position) -> Pairs:
        """Pairs of two equal answers are left out."""
        rows = [self.rows[place] for place in self.drawn(position)]
        lengths = self.dataset.tokens_of(rows, "input_ids", "rejected_ids")
        pairs = read_pairs(self.dataset, even_share(self.ranks, rows, lengths))
        total = int(self.ranks.sum(torch.tensor(len(pairs), dtype=torch.float64)))
        if total == 0:
            raise DataError(
                f"none of the {self.config.batch_size} pairs of step {position.step + 1} has two answers "
                "that differ",
                who=str(self.dataset.folder),
                fix="leave such rows out of the data, or raise max_length if it cut the difference off",
            )
        return Pairs(pairs, total)

    def backward(self, batch: Pairs, meter: Meter) -> torch.Tensor:
        """The gradients of the Bradley-Terry loss."""
        loss = self.nothing()
        for packed in pair_batches(batch.pairs, self.config.packing, self.ranks, meter):
            margin = margins(self.model, packed)
            part = bradley_terry(margin).sum() / batch.total
            torch.autograd.backward(part)
            loss += part.detach()
            meter.mean("accuracy", agreement(margin.detach()).sum(), len(margin))
            meter.mean("margin", margin.detach().double().sum(), len(margin))
        return loss


def run_reward_model(stage: RewardModelStage, context: StageContext) -> StageResult:
    """Train on the pairs; see ``SupervisedWork.step`` for what a step does."""
    check_stage(context.name, stage, world=context.ranks.data_world)
    return train(prepare(stage, context), context)


def prepare(stage: RewardModelStage, context: StageContext) -> Setup:
    """Load the model and the pairs, and hold some of these out."""
    config = ModelConfig(path=stage.model) if isinstance(stage.model, str) else stage.model
    path = None if config.path is None else context.resolve(config.path)
    ranks = context.ranks
    loaded = load_reward_model(config, path, seed=context.run.seed, device=ranks.device, move=not cuts(ranks))
    apply_memory(loaded.model, stage.memory, cut=cuts(ranks))
    place(loaded.model, ranks)
    data = _load(stage, loaded, context)
    found = _split(stage, data, context)
    sampler = PositionSampler(len(found.trained), data.sampler.seed, data.sampler.shuffle)
    total_steps = Data(data.dataset, sampler).steps(stage, stage.batch_size)
    held_out = _held_out(stage, context, loaded, data.dataset, found, total_steps)
    _keep_template(loaded, data.dataset)
    stepper = make_stepper(loaded.model, stage.optimizer, context.ranks)
    LEDGER.watch("model", loaded.model, stepper.optimizer)
    work = RewardModelWork(
        config=stage,
        total_steps=total_steps,
        model=loaded.model,
        dataset=data.dataset,
        rows=found.trained,
        sampler=sampler,
        stepper=stepper,
        ranks=context.ranks,
    )
    return Setup(stage, loaded, stepper.optimizer, work, total_steps, data.dataset.fingerprint, held_out)


def _load(
    stage: RewardModelStage, loaded: LoadedModel, context: StageContext, *, holdout: bool = False
) -> Data:
    """The training data, or the dataset that is named for the evaluation."""
    source = stage.holdout.data if holdout and stage.holdout.data is not None else stage.data
    data = load_data(source, loaded, context, name=f"{context.name}-holdout" if holdout else None)
    check_pairs(data.dataset)
    _check_lengths(loaded, data)
    return data


def _check_lengths(loaded: LoadedModel, data: Data) -> None:
    limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    both = np.maximum(data.dataset.lengths, data.dataset.rejected_lengths)[: data.sampler.size]
    if limit is not None and both.max() > limit:
        raise DataError(
            f"{int((both > limit).sum())} of {len(both)} pairs are longer than the model's {limit} "
            f"positions; the longest has {int(both.max())} tokens",
            who=str(data.dataset.folder),
            fix=f"set data: {{path: …, max_length: {limit}, truncation: left}}",
        )


def _split(stage: RewardModelStage, data: Data, context: StageContext) -> Split:
    """What is trained on and what is not; the run folder remembers it."""
    seed = derive_seed(context.run.seed, context.name, "holdout")
    fraction = 0.0 if stage.holdout.data is not None else stage.holdout.fraction
    found = split(data.dataset, data.sampler.size, fraction, seed)
    if fraction and context.ranks.main:
        record(
            found, holdout_file(context), seed=seed, fraction=fraction, fingerprint=data.dataset.fingerprint
        )
    return found


def holdout_file(context: StageContext) -> Path:
    """Where the run folder keeps the rows that were held out."""
    return context.folder.data(f"{context.name}-holdout.json")


def _held_out(
    stage: RewardModelStage,
    context: StageContext,
    loaded: LoadedModel,
    dataset: SampleDataset,
    found: Split,
    total_steps: int,
) -> HeldOut | None:
    rows = found.held_out
    if stage.holdout.data is not None:
        other = _load(stage, loaded, context, holdout=True)
        dataset, rows = other.dataset, list(range(other.sampler.size))
    if not rows:
        return None
    return HeldOut(
        loaded.model, dataset, rows, stage.holdout.every, total_steps, stage.packing, context.ranks
    )


def _keep_template(loaded: LoadedModel, dataset: SampleDataset) -> None:
    """The tokenizer that goes along has the chat template that the pairs were written in, or none.

    So whoever scores an answer later joins it to its prompt as the training did.
    """
    loaded.tokenizer.chat_template = dataset.meta["template"]["text"]
