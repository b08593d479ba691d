"""One step of reinforcement learning: answer, judge, estimate, update, hand the weights over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from posttune import _segments as segments
from posttune.config.models import RlStage
from posttune.distributed.ranks import Ranks
from posttune.facade import Estimator
from posttune.loss.controllers import AdaptiveKL, FixedKL
from posttune.loss.kl import kl_terms
from posttune.memory.residence import give_back, lodges, resident
from posttune.models.load import LoadedModel, Reference
from posttune.models.params import named_hf_tensors
from posttune.trainer._alarms import Alarms
from posttune.trainer._balance import evened
from posttune.trainer._batch import RolloutBatch, make_batch, token_logprobs
from posttune.trainer._collect import Answers, Collector
from posttune.trainer._critic import Critic
from posttune.trainer._judge import token_rewards
from posttune.trainer._passes import Knobs
from posttune.trainer._prompts import Prompts
from posttune.trainer._samples import samples_table
from posttune.trainer._update import Updater, note_kl, note_policy
from posttune.trainer.loop import Position, StepOutput
from posttune.trainer.metrics import Meter, note_memory, reset_peak_memory
from posttune.trainer.schedule import learning_rate
from posttune.types import AdvantageBatch


@dataclass
class RlWork:
    """What an RL stage does in a step. Every rank does it for its own prompts."""

    config: RlStage
    total_steps: int
    loaded: LoadedModel
    reference: Reference | None  # None where no distance to it is asked for
    collector: Collector
    estimator: Estimator
    updater: Updater
    critic: Critic | None  # None where the estimator needs none
    kl_control: AdaptiveKL | FixedKL
    alarms: Alarms
    ranks: Ranks
    keep_samples: bool  # some observer wants them

    def begin(self, position: Position) -> None:
        """Give the engine the weights that training begins with."""
        if lodges(self.loaded.model):  # beside it there may be no room for an engine that is awake
            self.collector.engine.sleep()
            self._hand_over(position.step, Meter())
        else:
            self._send(position.step)

    def step(self, position: Position) -> StepOutput:
        """Take the step that begins at ``position``."""
        meter = Meter()
        reset_peak_memory(self.ranks.device)
        with meter.timed("step"):
            begun = self.collector.begin(position, meter)
            knobs = self._knobs(position, begun.prompts)
            batch = make_batch(begun.samples, begun.prompts.requests, self.ranks.device)
            self._ahead(batch, knobs, meter)
            answers = begun.answers()
            self._estimate(batch, answers, knobs, meter)
            share = self._share(batch, knobs, meter)
            self._settle(share, knobs, meter)
            self._learn(share, knobs, meter)
            self._hand_over(position.step + 1, meter)
        table = self._table(answers, batch, position)
        metrics = self._metrics(meter, position)
        alarms, stop = self.alarms.look(metrics)
        return StepOutput(metrics | alarms, answers.taken, table, stop)

    def _knobs(self, position: Position, prompts: Prompts) -> Knobs:
        """The policy's schedule begins once a critic has warmed up."""
        warmup = 0 if self.critic is None else self.critic.config.warmup_steps
        learns = position.step >= warmup
        step, total = position.step - warmup, self.total_steps - warmup
        lr = learning_rate(step, total, self.config.optimizer) if learns else 0.0
        return Knobs(position.step, prompts.all_ids, lr, self.kl_control.coef, learns)

    def _learn(self, batch: RolloutBatch, knobs: Knobs, meter: Meter) -> None:
        """Update the critic, and the policy unless the critic is to warm up first."""
        if self.critic is not None:
            with meter.timed("critic"):
                self.critic.update(batch, knobs, meter)
        with meter.timed("update"):
            if knobs.policy_learns:
                self.updater.update(batch, knobs, meter)
        meter.peak("lr", knobs.lr)

    def _ahead(self, batch: RolloutBatch, knobs: Knobs, meter: Meter) -> None:
        """The passes that need no rewards, while these are computed.

        Which samples the update passes over is seen by their advantages, so that with nothing but those
        in the loss the passes wait for the rewards.
        """
        if self.critic is not None:
            with meter.timed("critic"):
                batch.values = self.critic.values(batch)
        if self.config.kl.where != "reward":
            batch.fresh = self.updater.first_rows(batch, knobs)
            if knobs.policy_learns and self.updater.objective.advantage_only:
                return
        self._look_back(batch, batch.trainable(), meter)

    def _estimate(self, batch: RolloutBatch, answers: Answers, knobs: Knobs, meter: Meter) -> None:
        """Fill in advantages and returns."""
        judged, scores = answers.judged, answers.judged.values(self.ranks.device)
        rewards = token_rewards(judged.rewards, batch.packed)
        batch.scored = ~torch.isnan(scores)
        if self.config.kl.where == "reward":
            penalty = self._penalty(batch, knobs.kl_coef)
            rewards = rewards - penalty
            scores = scores - segments.masked_sums(penalty, batch.packed)
        outcome = self.estimator.compute(
            AdvantageBatch(
                packed=batch.packed,
                token_rewards=rewards,
                scores=scores,
                dims=judged.dimensions(self.ranks.device),
                values=batch.values,
                baselines=answers.baselines,
                reduce=self.ranks.sum,
            )
        )
        batch.advantages, batch.returns = outcome.advantages, outcome.returns
        for name, value in outcome.metrics.items():
            meter.peak(name, value)  # global already, and so equal on every rank

    def _share(self, batch: RolloutBatch, knobs: Knobs, meter: Meter) -> RolloutBatch:
        """What this process trains on, whichever process answered it."""
        if self.ranks.data_world == 1:
            return batch
        rows = batch.trainable() if self.critic is not None else self.updater.rows(batch, knobs)
        with meter.timed("update"):
            return evened(batch, rows, self.updater.passes.numbers(knobs), self.ranks, meter)

    def _settle(self, batch: RolloutBatch, knobs: Knobs, meter: Meter) -> None:
        """The passes of before the update, where they did not run ahead; and what they tell."""
        rows = batch.trainable()
        if batch.entropy is None:
            rows = self.updater.rows(batch, knobs)
            self._look_back(batch, rows, meter)
        seen = batch.only([row for row in rows if row not in batch.fresh])
        note_policy(meter, seen, batch.old_logp, batch.entropy, batch.rollout_logp)
        note_kl(meter, seen, batch.old_logp, batch.ref_logp, self.config.kl)

    def _look_back(self, batch: RolloutBatch, rows: Sequence[int], meter: Meter) -> None:
        """Log-probabilities under the reference, and under the policy that answered unless fresh."""
        packing, temperature = self.config.packing, self.config.rollout.sampling.temperature
        with meter.timed("logprob"):
            if self.reference is not None:
                with self.reference.use() as model:
                    batch.ref_logp, _ = token_logprobs(model, batch, rows, packing, temperature, self.ranks)
            rows = [row for row in rows if row not in batch.fresh]
            model = self.loaded.model.eval()
            batch.old_logp, batch.entropy = token_logprobs(
                model, batch, rows, packing, temperature, self.ranks, entropy=True
            )

    def _penalty(self, batch: RolloutBatch, coef: float) -> Tensor:
        """What the distance to the reference costs at each token of a scored sample, float64 [N]."""
        assert batch.ref_logp is not None
        distance = kl_terms(batch.old_logp, batch.ref_logp, self.config.kl.estimator).double()
        return torch.where(batch.only(batch.trainable()).mask, coef * distance, 0.0)

    def _hand_over(self, version: int, meter: Meter) -> None:
        with meter.timed("sync"):
            if self.collector.engine.info.sleep:  # what the allocator keeps of the update is its room
                give_back(self.ranks.device)
            self.collector.engine.wake("weights")
            self._send(version)
            self.collector.engine.wake("cache")

    def _send(self, version: int) -> None:
        """Give the engine the trainer's weights, unless it computes with these very tensors."""
        engine = self.collector.engine
        shared = engine.info.shares_weights
        with resident(self.loaded.model):
            engine.load_weights(() if shared else named_hf_tensors(self.loaded.model), version)

    def _table(self, answers: Answers, batch: RolloutBatch, position: Position) -> pa.Table | None:
        if not self.keep_samples:
            return None
        return samples_table(answers.samples, batch, answers.judged, position.after(0), self.ranks)

    def _metrics(self, meter: Meter, position: Position) -> dict[str, float]:
        """The step's metrics over all ranks; the KL controller learns from them."""
        note_memory(meter)
        metrics = meter.reduce(self.ranks)
        count, tokens = int(metrics.pop("samples")), metrics.pop("tokens")
        metrics["rollout/weight_version"] = position.step
        metrics["tokens_per_s"] = tokens / metrics["time/step_s"]
        metrics["rollout/tokens_per_s"] = tokens / metrics["time/rollout_s"]
        metrics["update/tokens_per_s"] = metrics.pop("update/tokens", 0.0) / metrics["time/update_s"]
        if "kl" in metrics:
            metrics["kl_coef"] = self.kl_control.coef
            self.kl_control.update(kl=metrics["kl"], n=count)
        return metrics

    def nonfinite_in_a_row(self) -> int:
        """Optimiser steps skipped since the last that was taken."""
        steppers = [self.updater.stepper, *([] if self.critic is None else [self.critic.stepper])]
        return max(stepper.in_a_row for stepper in steppers)

    def state(self) -> dict[str, Any]:
        """The controller's state and the alarms'."""
        return {"kl_control": self.kl_control.state_dict(), "alarms": self.alarms.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from ``state``."""
        self.kl_control.load_state_dict(state["kl_control"])
        self.alarms.load_state_dict(state.get("alarms", {}))
