"""Supervised fine-tuning: cross-entropy on the response and its EOS."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from posttune.config.models import SftStage
from posttune.data.dataset import SampleDataset
from posttune.data.packing import ModelBatch, TokenSequence
from posttune.data.sampler import PositionSampler
from posttune.distributed.ranks import Ranks
from posttune.errors import DataError
from posttune.loss.aggregate import aggregate
from posttune.memory.ledger import LEDGER
from posttune.models.forward import response_logprobs
from posttune.run.stages import StageContext, StageResult
from posttune.trainer._batch import even_share, model_batches
from posttune.trainer._inputs import load_data, load_stage_model
from posttune.trainer.checks import check_stage
from posttune.trainer.loop import Position, StepOutput
from posttune.trainer.metrics import Meter, note_memory, reset_peak_memory
from posttune.trainer.optimizer import Stepper, make_stepper
from posttune.trainer.schedule import learning_rate
from posttune.trainer.stage import Setup, train
from posttune.trainer.validation import make_validation
from posttune.types import Totals


@dataclass
class SftWork:
    """What an SFT stage does in a step. Every rank does it for its own share of the sequences."""

    config: SftStage
    total_steps: int
    model: torch.nn.Module
    dataset: SampleDataset
    sampler: PositionSampler
    stepper: Stepper
    ranks: Ranks

    def begin(self, position: Position) -> None:
        """Nothing to prepare."""

    def step(self, position: Position) -> StepOutput:
        """Take the step that begins at ``position``."""
        meter = Meter()
        reset_peak_memory(self.ranks.device)
        with meter.timed("step"):
            sequences = self._sequences(position)
            totals = self._totals(sequences, position)
            lr = learning_rate(position.step, self.total_steps, self.config.optimizer)
            with meter.timed("update"):
                self._update(sequences, totals, lr, meter)
        meter.peak("lr", lr)
        note_memory(meter)
        metrics = meter.reduce(self.ranks)
        metrics["tokens_per_s"] = metrics.pop("update/tokens", 0.0) / metrics["time/step_s"]
        return StepOutput(metrics, self.config.batch_size)

    def _sequences(self, position: Position) -> list[TokenSequence]:
        """This rank's share; rows with nothing to predict are left out, as they are of every count."""
        drawn = self.sampler.indices(position.consumed, self.config.batch_size)
        indices = even_share(self.ranks, drawn, self.dataset.lengths[drawn].tolist())
        rows = [self.dataset[index] for index in indices]
        sequences = [TokenSequence.from_mask(row["input_ids"], row["loss_mask"]) for row in rows]
        return [sequence for sequence in sequences if sequence.response_length]

    def _totals(self, sequences: list[TokenSequence], position: Position) -> Totals:
        tokens = sum(trained_tokens(sequence) for sequence in sequences)
        counts = self.ranks.sum(torch.tensor([tokens, len(sequences)], dtype=torch.float64)).tolist()
        if counts[0] == 0:
            raise DataError(
                f"none of the {self.config.batch_size} rows of step {position.step + 1} has a token to train",
                who=str(self.dataset.folder),
                fix="SFT needs responses: map a response (or messages that end with one) when converting",
            )
        return Totals(tokens=int(counts[0]), sequences=int(counts[1]))

    def _update(self, sequences: list[TokenSequence], totals: Totals, lr: float, meter: Meter) -> None:
        self.model.train()
        loss = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        self.stepper.begin(lr)
        for batch in model_batches(sequences, self.config.packing, self.ranks, meter):
            part = cross_entropy(self.model, batch, totals)
            torch.autograd.backward(part)
            loss += part.detach()
        total = float(self.ranks.sum(loss))
        meter.mean("grad_norm", self.stepper.step(lr, total))
        meter.mean("loss", total)
        meter.peak("update/nonfinite_steps", int(self.stepper.in_a_row > 0))

    def nonfinite_in_a_row(self) -> int:
        """Optimiser steps skipped since the last that was taken."""
        return self.stepper.in_a_row

    def state(self) -> dict[str, Any]:
        """Nothing: everything follows from the position."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to take back."""


def run_sft(stage: SftStage, context: StageContext) -> StageResult:
    """Train on the dataset's responses; see ``SftWork.step`` for what a step does."""
    check_stage(context.name, stage, world=context.ranks.data_world)
    with ExitStack() as stack:
        return train(prepare(stage, context, stack), context)


def prepare(stage: SftStage, context: StageContext, stack: ExitStack) -> Setup:
    """Load the model and the data. ``stack`` stops the engine of the validation, where there is one."""
    loaded = load_stage_model(stage, context)
    data = load_data(stage.data, loaded, context)
    stepper = make_stepper(loaded.model, stage.optimizer, context.ranks)
    LEDGER.watch("model", loaded.model, stepper.optimizer)
    total_steps = data.steps(stage, stage.batch_size)
    work = SftWork(
        config=stage,
        total_steps=total_steps,
        model=loaded.model,
        dataset=data.dataset,
        sampler=data.sampler,
        stepper=stepper,
        ranks=context.ranks,
    )
    validation = make_validation(stage.evaluate, context, loaded, stack)
    return Setup(stage, loaded, stepper.optimizer, work, total_steps, data.dataset.fingerprint, validation)


def trained_tokens(sequence: TokenSequence) -> int:
    """How many tokens of a sequence the loss covers."""
    mask = sequence.response_mask
    return sequence.response_length if mask is None else sum(mask)


def cross_entropy(model: torch.nn.Module, batch: ModelBatch, totals: Totals) -> torch.Tensor:
    """This batch's share of the mean of -log p over the trained tokens of the whole step, nats."""
    logp = response_logprobs(model, batch, temperature=1.0).logp
    return aggregate(-logp, batch.packed, "token_mean", totals)
