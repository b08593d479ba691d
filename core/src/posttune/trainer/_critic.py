"""The critic: what it thinks of every token before an update, and how it learns from the returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttune.checkpoint.parts import Part
from posttune.config.models import CriticConfig, PackingConfig
from posttune.loss.aggregate import aggregate
from posttune.loss.value import explained_variance, value_loss
from posttune.memory.residence import resident
from posttune.models.load import LoadedModel
from posttune.models.values import response_values
from posttune.trainer._batch import Micro, RolloutBatch, micro_batches
from posttune.trainer._passes import Knobs, Passes
from posttune.trainer.metrics import Meter
from posttune.trainer.optimizer import Stepper
from posttune.trainer.schedule import learning_rate
from posttune.types import Totals

PART = "critic"


@dataclass
class Critic:
    """A model with a scalar head, and its own optimiser. Every rank calls everything."""

    config: CriticConfig
    loaded: LoadedModel
    stepper: Stepper
    passes: Passes
    packing: PackingConfig
    total_steps: int

    @property
    def part(self) -> Part:
        """What a checkpoint keeps of it."""
        return Part(self.loaded.model, self.stepper.optimizer, self.loaded.base)

    @torch.no_grad()
    def values(self, batch: RolloutBatch) -> Tensor:
        """Value of the state before each response token, float32 [N]; 0 where the sample is unscorable."""
        model = self.loaded.model.eval()
        values = torch.zeros_like(batch.advantages)
        with resident(model):
            for micro in micro_batches(batch, batch.trainable(), self.packing, self.passes.ranks):
                values[micro.index] = response_values(model, micro.inputs)
        return values

    def update(self, batch: RolloutBatch, knobs: Knobs, meter: Meter) -> None:
        """Pass over the batch, whose values and returns are known."""
        self._note(batch, meter)
        self.loaded.model.train()
        lr = learning_rate(knobs.step, self.total_steps, self.config.optimizer)
        meter.peak("value/lr", lr)
        with resident(self.loaded.model, self.stepper.optimizer):
            for epoch in range(self.passes.epochs):
                for chosen in self.passes.parts(knobs, epoch):
                    self._optimise(batch, self.passes.members(batch, chosen), lr, meter)

    def _optimise(self, batch: RolloutBatch, rows: Sequence[int], lr: float, meter: Meter) -> None:
        totals = self.passes.totals(batch, rows)
        loss = torch.zeros((), dtype=torch.float64, device=batch.advantages.device)
        self.stepper.begin(lr)
        for micro in micro_batches(batch, rows, self.packing, self.passes.ranks):
            loss += self._backward(batch, micro, totals, meter)
        total = float(self.passes.ranks.sum(loss))
        grad_norm = self.stepper.step(lr, total)
        finite = self.stepper.in_a_row == 0
        meter.sum("value/nonfinite_steps", 0 if finite or not self.passes.ranks.main else 1)
        if finite:
            meter.mean("loss/value", total)
            meter.mean("value/grad_norm", grad_norm)

    def _backward(self, batch: RolloutBatch, micro: Micro, totals: Totals, meter: Meter) -> Tensor:
        """Add the gradient of one micro-batch; returns its share of the loss, the mean over tokens."""
        old_values, returns = micro.of(batch.values), micro.of(batch.returns)
        assert old_values is not None
        assert returns is not None
        packed = micro.inputs.packed
        values = response_values(self.loaded.model, micro.inputs)
        outcome = value_loss(values, old_values, returns, packed.mask, self.config.clip_range)
        for name, (part, count) in outcome.metrics.items():
            meter.mean(name, part, count)
        loss = aggregate(outcome.loss, packed, "token_mean", totals)
        torch.autograd.backward(loss)
        return loss.detach().double()

    def _note(self, batch: RolloutBatch, meter: Meter) -> None:
        """What the values of before the update were worth."""
        assert batch.values is not None
        assert batch.returns is not None
        mask = batch.only(batch.trainable()).mask
        found = explained_variance(batch.values, batch.returns, mask, self.passes.ranks.sum)
        meter.peak("value/explained_variance", found if math.isfinite(found) else 0.0)
        meter.mean("value/mean", torch.where(mask, batch.values, 0.0).double().sum(), mask.sum())
        meter.mean("value/return_mean", torch.where(mask, batch.returns, 0.0).double().sum(), mask.sum())
