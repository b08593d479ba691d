"""Reward models: a scalar head that ranks answers, fitted to preferences (Bradley-Terry)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttune.config.models import ModelConfig, RewardModelStage
from posttune.data.dataset import SampleDataset
from posttune.data.sampler import PositionSampler
from posttune.distributed.ranks import Ranks
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
from posttune.trainer.checks import check_stage
from posttune.trainer.loop import Position, StepOutput
from posttune.trainer.metrics import Meter, note_memory, reset_peak_memory
from posttune.trainer.optimizer import Stepper, make_stepper
from posttune.trainer.schedule import learning_rate
from posttune.trainer.stage import Setup, train


@dataclass
class RewardModelWork:
    """What a reward_model stage does in a step. Every rank does it for its own share of the pairs."""

    config: RewardModelStage
    total_steps: int
    model: torch.nn.Module
    dataset: SampleDataset
    rows: list[int]  # of the dataset, that are trained on
    sampler: PositionSampler  # over ``rows``
    stepper: Stepper
    ranks: Ranks

    def begin(self, position: Position) -> None:
        """Nothing to prepare."""

    def step(self, position: Position) -> StepOutput:
        """Take the step that begins at ``position``."""
        meter = Meter()
        reset_peak_memory(self.ranks.device)
        with meter.timed("step"):
            pairs = self._pairs(position)
            total = self._count(pairs, position)
            lr = learning_rate(position.step, self.total_steps, self.config.optimizer)
            with meter.timed("update"):
                self._update(pairs, total, lr, meter)
        meter.peak("lr", lr)
        note_memory(meter)
        metrics = meter.reduce(self.ranks)
        metrics["tokens_per_s"] = metrics.pop("update/tokens", 0.0) / metrics["time/step_s"]
        return StepOutput(metrics, self.config.batch_size)

    def _pairs(self, position: Position) -> list[Pair]:
        """This rank's share of the step's pairs."""
        drawn = self.sampler.indices(position.consumed, self.config.batch_size)
        rows = [self.rows[place] for place in drawn]
        lengths = self.dataset.lengths[rows] + self.dataset.rejected_lengths[rows]
        return read_pairs(self.dataset, even_share(self.ranks, rows, lengths.tolist()))

    def _count(self, pairs: list[Pair], position: Position) -> int:
        """Pairs of the step over all ranks: what its means are over."""
        total = int(self.ranks.sum(torch.tensor(len(pairs), dtype=torch.float64)))
        if total == 0:
            raise DataError(
                f"none of the {self.config.batch_size} pairs of step {position.step + 1} has two answers "
                "that differ",
                who=str(self.dataset.folder),
                fix="leave such rows out of the data, or raise max_length if it cut the difference off",
            )
        return total

    def _update(self, pairs: list[Pair], total: int, lr: float, meter: Meter) -> None:
        self.model.train()
        loss = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        self.stepper.begin(lr)
        for batch in pair_batches(pairs, self.config.packing, self.ranks, meter):
            margin = margins(self.model, batch)
            part = bradley_terry(margin).sum() / total
            torch.autograd.backward(part)
            loss += part.detach()
            meter.mean("accuracy", agreement(margin.detach()).sum(), len(margin))
            meter.mean("margin", margin.detach().double().sum(), len(margin))
        summed = float(self.ranks.sum(loss))
        meter.mean("grad_norm", self.stepper.step(lr, summed))
        meter.mean("loss", summed)
        meter.peak("update/nonfinite_steps", int(self.stepper.in_a_row > 0))

    def nonfinite_in_a_row(self) -> int:
        """Optimiser steps skipped since the last that was taken."""
        return self.stepper.in_a_row

    def state(self) -> dict[str, Any]:
        """Nothing: everything follows from the position."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to take back."""


def run_reward_model(stage: RewardModelStage, context: StageContext) -> StageResult:
    """Train on the pairs; see ``RewardModelWork.step`` for what a step does."""
    check_stage(context.name, stage, world=context.ranks.data_world)
    return train(prepare(stage, context), context)


def prepare(stage: RewardModelStage, context: StageContext) -> Setup:
    """Load the model and the pairs, and hold some of these out."""
    config = ModelConfig(path=stage.model) if isinstance(stage.model, str) else stage.model
    path = None if config.path is None else context.resolve(config.path)
    ranks = context.ranks
    loaded = load_reward_model(config, path, seed=context.run.seed, device=ranks.device, move=not cuts(ranks))
    apply_memory(loaded.model, stage.memory)
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
