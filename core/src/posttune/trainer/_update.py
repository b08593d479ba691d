"""From advantages to optimiser steps: mini-batches of whole prompts, micro-batches under a token budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from posttune import _segments as segments
from posttune.config.models import KLConfig, MismatchConfig, PackingConfig
from posttune.distributed.ranks import Ranks
from posttune.facade import PolicyLoss
from posttune.loss.aggregate import aggregate
from posttune.loss.kl import kl_terms
from posttune.loss.mismatch import Gap, gap, importance_weights
from posttune.memory.residence import resident
from posttune.models.forward import ForwardOut, response_logprobs
from posttune.trainer._batch import Micro, RolloutBatch, micro_batches
from posttune.trainer._passes import Knobs, Passes
from posttune.trainer.metrics import Meter
from posttune.trainer.optimizer import Stepper
from posttune.types import LossBatch, Packed, Totals

CORRECTIONS: dict[str, tuple[Literal["token", "sequence"], Literal["truncate", "mask"]]] = {
    "truncated_token": ("token", "truncate"),
    "truncated_sequence": ("sequence", "truncate"),
    "mask_token": ("token", "mask"),
    "mask_sequence": ("sequence", "mask"),
}
TERMS = ("loss/policy", "loss/entropy", "loss/kl")


@dataclass(frozen=True)
class Objective:
    """What is minimised: policy loss - entropy_coef x entropy + kl_coef x KL, all averaged alike."""

    loss: PolicyLoss
    aggregation: str
    temperature: float
    entropy_coef: float
    kl: KLConfig
    mismatch: MismatchConfig

    @property
    def kl_in_loss(self) -> bool:
        """Whether the distance to the reference is a term of the loss."""
        return self.kl.where == "loss"

    @property
    def advantage_only(self) -> bool:
        """Whether a sequence whose advantages are all 0 adds exactly nothing to the gradient."""
        return self.loss.traits.advantage_only and self.entropy_coef == 0 and not self.kl_in_loss


@dataclass
class Updater:
    """Takes the optimiser steps of one RL step."""

    model: torch.nn.Module
    stepper: Stepper
    objective: Objective
    passes: Passes
    packing: PackingConfig
    ranks: Ranks

    def rows(self, batch: RolloutBatch, knobs: Knobs) -> list[int]:
        """Sequences that must be passed through the model; without an update, all, for their metrics."""
        rows = batch.trainable()
        leave_out = knobs.policy_learns and self.objective.advantage_only
        return batch.with_signal(rows) if leave_out else rows

    def first_rows(self, batch: RolloutBatch, knobs: Knobs) -> set[int]:
        """Sequences of the first mini-batch: the policy is still the one that answered.

        Their old log-probabilities are the update's own, exactly, so no pass is needed to know them.
        """
        chosen = next(self.passes.parts(knobs, epoch=0), set()) if knobs.policy_learns else set()
        return {row for row, group in enumerate(batch.packed.group) if group in chosen}

    def update(self, batch: RolloutBatch, knobs: Knobs, meter: Meter) -> None:
        """Pass over the batch, as often and in as many parts as is configured."""
        self.model.train()
        members, rows = batch.trainable(), set(self.rows(batch, knobs))
        with resident(self.model, self.stepper.optimizer):
            for epoch in range(self.passes.epochs):
                for chosen in self.passes.parts(knobs, epoch):
                    part = self.passes.members(batch, chosen)
                    totals = self.passes.totals(batch, part)
                    self._optimise(batch, [row for row in part if row in rows], totals, knobs, meter)
                    batch.fresh = set()
        meter.mean("update/skipped_fraction", len(members) - len(rows), len(members))

    def _optimise(
        self, batch: RolloutBatch, rows: Sequence[int], totals: Totals, knobs: Knobs, meter: Meter
    ) -> None:
        """One optimiser step. ``totals`` counts the rows that are left out too: their gradient is 0."""
        fresh = not batch.fresh.isdisjoint(rows)
        terms = torch.zeros(len(TERMS), dtype=torch.float64, device=batch.advantages.device)
        self.stepper.begin(knobs.lr)
        for micro in micro_batches(batch, rows, self.packing, self.ranks, meter):
            terms += self._backward(batch, micro, totals, knobs, meter, fresh=fresh)
        values = self.ranks.sum(terms).tolist()
        grad_norm = self.stepper.step(knobs.lr, math.fsum(values))
        self._note(values, grad_norm, meter)

    def _backward(
        self, batch: RolloutBatch, micro: Micro, totals: Totals, knobs: Knobs, meter: Meter, *, fresh: bool
    ) -> Tensor:
        """Add the gradient of one micro-batch; returns its share of the terms, float64 [3]."""
        objective = self.objective
        entropy = fresh or objective.entropy_coef > 0
        out = response_logprobs(self.model, micro.inputs, temperature=objective.temperature, entropy=entropy)
        if not len(micro.index):  # other processes have more: their passes take this one's part
            torch.autograd.backward(out.logp.sum())
            return torch.zeros(len(TERMS), dtype=torch.float64, device=micro.index.device)
        if fresh:
            self._first_look(batch, micro, out, meter)
        terms = (
            self._mean(self._policy_loss(batch, micro, out.logp, meter), micro, totals),
            self._entropy_term(out.entropy, micro, totals),
            self._kl_term(batch, micro, out.logp, totals, knobs.kl_coef),
        )
        torch.autograd.backward(terms[0] + terms[1] + terms[2])
        return torch.stack([term.detach().double() for term in terms])

    def _first_look(self, batch: RolloutBatch, micro: Micro, out: ForwardOut, meter: Meter) -> None:
        """Keep the old log-probabilities, and note what is measured on the policy that answered."""
        logp, packed = out.logp.detach(), micro.inputs.packed
        batch.old_logp[micro.index] = logp
        note_policy(meter, packed, logp, out.entropy, micro.of(batch.rollout_logp))
        note_kl(meter, packed, logp, micro.of(batch.ref_logp), self.objective.kl)

    def _mean(self, values: Tensor, micro: Micro, totals: Totals) -> Tensor:
        return aggregate(values, micro.inputs.packed, self.objective.aggregation, totals)

    def _entropy_term(self, entropy: Tensor | None, micro: Micro, totals: Totals) -> Tensor:
        coef = self.objective.entropy_coef
        if entropy is None or not coef:
            return torch.zeros((), device=micro.index.device)
        return -coef * self._mean(entropy, micro, totals)

    def _kl_term(
        self, batch: RolloutBatch, micro: Micro, logp: Tensor, totals: Totals, coef: float
    ) -> Tensor:
        ref_logp = micro.of(batch.ref_logp)
        if ref_logp is None or not self.objective.kl_in_loss:
            return torch.zeros((), device=logp.device)
        return coef * self._mean(kl_terms(logp, ref_logp, self.objective.kl.estimator), micro, totals)

    def _policy_loss(self, batch: RolloutBatch, micro: Micro, logp: Tensor, meter: Meter) -> Tensor:
        outcome = self.objective.loss.compute(
            LossBatch(
                packed=micro.inputs.packed,
                logp=logp,
                old_logp=batch.old_logp[micro.index],
                rollout_logp=micro.of(batch.rollout_logp),
                advantages=batch.advantages[micro.index],
            )
        )
        for name, (total, count) in outcome.metrics.items():
            meter.mean(name, total, count)
        return self._corrected(outcome.loss, batch, micro, meter)

    def _corrected(self, loss: Tensor, batch: RolloutBatch, micro: Micro, meter: Meter) -> Tensor:
        """The loss of each token times the weight that makes up for the engine's other probabilities."""
        mismatch, rollout_logp = self.objective.mismatch, micro.of(batch.rollout_logp)
        if mismatch.correction == "none" or rollout_logp is None:
            return loss
        level, mode = CORRECTIONS[mismatch.correction]
        packed, cap, floor = micro.inputs.packed, mismatch.cap, mismatch.floor
        old_logp = batch.old_logp[micro.index]
        weights = importance_weights(
            old_logp, rollout_logp, packed, level=level, mode=mode, cap=cap, floor=floor
        )
        meter.mean("rollout/correction_mean", weights.double().sum(), packed.mask.sum())
        return loss * weights

    def _note(self, values: Sequence[float], grad_norm: float, meter: Meter) -> None:
        finite = self.stepper.in_a_row == 0
        meter.sum("update/nonfinite_steps", 0 if finite or not self.ranks.main else 1)
        if not finite:
            return
        meter.mean("grad_norm", grad_norm)
        present = (True, self.objective.entropy_coef > 0, self.objective.kl_in_loss)
        for name, value, there in zip(TERMS, values, present, strict=True):
            if there:
                meter.mean(name, value)


def note_policy(
    meter: Meter, packed: Packed, logp: Tensor, entropy: Tensor | None, rollout_logp: Tensor | None
) -> None:
    """Entropy, and the gap between the trainer's and the engine's log-probabilities of the same tokens."""
    count = packed.mask.sum()
    if entropy is not None:
        meter.mean("entropy", torch.where(packed.mask, entropy.detach(), 0.0).double().sum(), count)
    found = gap(logp, rollout_logp, packed.mask) if rollout_logp is not None else Gap()
    if found.tokens:
        meter.mean("rollout/logprob_gap_mean", found.total, found.tokens)
        meter.peak("rollout/logprob_gap_max", found.largest)
        meter.weights("rollout/effective_sample_size", found.weights, found.squares, found.tokens)


def note_kl(meter: Meter, packed: Packed, logp: Tensor, ref_logp: Tensor | None, kl: KLConfig) -> None:
    """``kl``: the mean over sequences of each one's mean over its tokens."""
    if ref_logp is None:
        return
    means = segments.masked_means(kl_terms(logp, ref_logp, kl.estimator).double(), packed)
    meter.mean("kl", means.sum(), (segments.token_counts(packed) > 0).sum())
