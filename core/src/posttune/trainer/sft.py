"""Supervised fine-tuning: cross-entropy on the response and its EOS."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from posttune.config.models import SftStage
from posttune.data.packing import ModelBatch, TokenSequence
from posttune.errors import DataError
from posttune.loss.aggregate import aggregate
from posttune.memory.ledger import LEDGER
from posttune.models.forward import response_logprobs
from posttune.run.stages import StageContext, StageResult
from posttune.trainer._batch import even_share, model_batches
from posttune.trainer._inputs import load_data, load_stage_model
from posttune.trainer._supervised import SupervisedWork
from posttune.trainer.checks import check_stage
from posttune.trainer.loop import Position
from posttune.trainer.metrics import Meter
from posttune.trainer.optimizer import make_stepper
from posttune.trainer.stage import Setup, train
from posttune.trainer.validation import make_validation
from posttune.types import Totals


@dataclass(frozen=True)
class Answers:
    """This rank's sequences of a step, and the counts over all ranks."""

    sequences: list[TokenSequence]
    totals: Totals


class SftWork(SupervisedWork[SftStage, Answers]):
    """What an SFT stage does in a step."""

    def read(self, position: Position) -> Answers:
        """This rank's sequences, of about as many tokens as every other's."""
        sequences = self._sequences(position)
        return Answers(sequences, self._totals(sequences, position))

    def _sequences(self, position: Position) -> list[TokenSequence]:
        """This rank's share; rows with nothing to predict are left out, as they are of every count."""
        drawn = self.drawn(position)
        rows = [
            self.dataset[row]
            for row in even_share(self.ranks, drawn, self.dataset.tokens_of(drawn, "input_ids"))
        ]
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

    def backward(self, batch: Answers, meter: Meter) -> torch.Tensor:
        """The gradients of the cross-entropy."""
        loss = self.nothing()
        for packed in model_batches(batch.sequences, self.config.packing, self.ranks, meter):
            part = cross_entropy(self.model, packed, batch.totals)
            torch.autograd.backward(part)
            loss += part.detach()
        return loss


def run_sft(stage: SftStage, context: StageContext) -> StageResult:
    """Train on the dataset's responses; see ``SupervisedWork.step`` for what a step does."""
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
