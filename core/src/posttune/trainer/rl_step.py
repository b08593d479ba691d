"""One step of reinforcement learning: answer, judge, estimate, update, hand the weights over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from posttune import _segments as segments
from posttune.config.models import RlStage
from posttune.distributed.ranks import Ranks
from posttune.facade import Estimator, RewardManager, Rewards, RolloutEngine
from posttune.loss.controllers import AdaptiveKL, FixedKL
from posttune.loss.kl import kl_terms
from posttune.models.load import LoadedModel, Reference
from posttune.models.params import named_hf_tensors
from posttune.rollout.requests import make_samples
from posttune.trainer._batch import RolloutBatch, make_batch, token_logprobs
from posttune.trainer._judge import Judged, judge, note_rewards, token_rewards
from posttune.trainer._prompts import Prompts, PromptStream
from posttune.trainer._samples import samples_table
from posttune.trainer._update import Knobs, Updater, note_kl, note_policy
from posttune.trainer.loop import Position, StepOutput
from posttune.trainer.metrics import Meter, peak_memory_mb, reset_peak_memory
from posttune.trainer.schedule import learning_rate
from posttune.types import AdvantageBatch, Sample, Sampling


@dataclass
class RlWork:
    """What an RL stage does in a step. Every rank does it for its own prompts."""

    config: RlStage
    total_steps: int
    loaded: LoadedModel
    reference: Reference | None  # None where no distance to it is asked for
    engine: RolloutEngine
    sampling: Sampling
    prompts: PromptStream
    rewards: Rewards
    manager: RewardManager
    estimator: Estimator
    updater: Updater
    kl_control: AdaptiveKL | FixedKL
    ranks: Ranks
    keep_samples: bool  # some observer wants them

    def begin(self, position: Position) -> None:
        """Give the engine the weights that training begins with."""
        self._send(position.step)

    def step(self, position: Position) -> StepOutput:
        """Take the step that begins at ``position``."""
        meter = Meter()
        reset_peak_memory(self.ranks.device)
        with meter.timed("step"):
            prompts = self.prompts.take(position.consumed)
            knobs = self._knobs(position, prompts)
            samples = self._answer(prompts, self.sampling, meter)
            greedy = self._answer_greedily(prompts, meter)
            self.engine.sleep()
            judged = self._judge(samples, meter)
            batch = make_batch(samples, prompts.requests, self.ranks.device)
            self._estimate(batch, judged, self._baselines(greedy, meter), knobs, meter)
            with meter.timed("update"):
                self.updater.update(batch, knobs, meter)
            self._hand_over(position.step + 1, meter)
        meter.peak("lr", knobs.lr)
        table = self._table(samples, batch, judged, position)
        return StepOutput(self._metrics(meter, samples, position), len(prompts.all_ids), table)

    def _knobs(self, position: Position, prompts: Prompts) -> Knobs:
        lr = learning_rate(position.step, self.total_steps, self.config.optimizer)
        return Knobs(position.step, prompts.all_ids, lr, self.kl_control.coef)

    def _answer(self, prompts: Prompts, sampling: Sampling, meter: Meter) -> list[Sample]:
        with meter.timed("rollout"):
            completions = self.engine.generate(prompts.requests, sampling)
        return make_samples(prompts.rows, prompts.requests, completions, self.loaded.tokenizer)

    def _answer_greedily(self, prompts: Prompts, meter: Meter) -> list[Sample]:
        """One answer a prompt, where the estimator compares with it."""
        if not self.estimator.traits.needs_greedy_baseline:
            return []
        greedy = replace(self.sampling, n=1, temperature=0.0, top_p=1.0, top_k=0, logprobs=False)
        return self._answer(prompts, greedy, meter)

    def _judge(self, samples: Sequence[Sample], meter: Meter) -> Judged:
        with meter.timed("reward"):
            judged = judge(samples, self.rewards, self.manager)
        note_rewards(meter, judged)
        return judged

    def _baselines(self, greedy: Sequence[Sample], meter: Meter) -> Tensor | None:
        """The reward of the greedy answer to each sample's prompt, float64 [S]."""
        if not self.estimator.traits.needs_greedy_baseline:
            return None
        with meter.timed("reward"):
            values = judge(greedy, self.rewards, self.manager).values(self.ranks.device)
        return values.repeat_interleave(self.sampling.n)

    def _estimate(
        self, batch: RolloutBatch, judged: Judged, baselines: Tensor | None, knobs: Knobs, meter: Meter
    ) -> None:
        """Fill in what the update needs: advantages, and log-probabilities under the policies of before."""
        scores = judged.values(self.ranks.device)
        rewards = token_rewards(judged.rewards, batch.packed)
        batch.scored = ~torch.isnan(scores)
        if self.config.kl.where == "reward":
            self._look_back(batch, batch.trainable(), meter)
            penalty = self._penalty(batch, knobs.kl_coef)
            rewards = rewards - penalty
            scores = scores - segments.masked_sums(penalty, batch.packed)
        outcome = self.estimator.compute(
            AdvantageBatch(
                packed=batch.packed,
                token_rewards=rewards,
                scores=scores,
                dims=judged.dimensions(self.ranks.device),
                values=None,
                baselines=baselines,
                reduce=self.ranks.sum,
            )
        )
        batch.advantages = outcome.advantages
        for name, value in outcome.metrics.items():
            meter.peak(name, value)  # global already, and so equal on every rank
        if self.config.kl.where != "reward":
            batch.fresh = self.updater.first_rows(batch, knobs)
            self._look_back(batch, self.updater.rows(batch), meter)

    def _look_back(self, batch: RolloutBatch, rows: Sequence[int], meter: Meter) -> None:
        """Log-probabilities under the reference, and under the policy that answered unless fresh."""
        packing, temperature = self.config.packing, self.sampling.temperature
        with meter.timed("logprob"):
            if self.reference is not None:
                with self.reference.use() as model:
                    batch.ref_logp, _ = token_logprobs(model, batch, rows, packing, temperature)
            rows = [row for row in rows if row not in batch.fresh]
            model = self.loaded.model.eval()
            batch.old_logp, entropy = token_logprobs(model, batch, rows, packing, temperature, entropy=True)
        seen = batch.only(rows)
        note_policy(meter, seen, batch.old_logp, entropy, batch.rollout_logp)
        note_kl(meter, seen, batch.old_logp, batch.ref_logp, self.config.kl)

    def _penalty(self, batch: RolloutBatch, coef: float) -> Tensor:
        """What the distance to the reference costs at each token of a scored sample, float64 [N]."""
        assert batch.ref_logp is not None
        distance = kl_terms(batch.old_logp, batch.ref_logp, self.config.kl.estimator).double()
        return torch.where(batch.only(batch.trainable()).mask, coef * distance, 0.0)

    def _hand_over(self, version: int, meter: Meter) -> None:
        with meter.timed("sync"):
            self.engine.wake("weights")
            self._send(version)
            self.engine.wake("cache")

    def _send(self, version: int) -> None:
        """Give the engine the trainer's weights, unless it computes with these very tensors."""
        shared = self.engine.info.shares_weights
        self.engine.load_weights(() if shared else named_hf_tensors(self.loaded.model), version)

    def _table(
        self, samples: Sequence[Sample], batch: RolloutBatch, judged: Judged, position: Position
    ) -> pa.Table | None:
        if not self.keep_samples:
            return None
        return samples_table(samples, batch, judged, position.after(0), self.ranks)

    def _metrics(self, meter: Meter, samples: Sequence[Sample], position: Position) -> dict[str, float]:
        """The step's metrics over all ranks; the KL controller learns from them."""
        note_completions(meter, samples)
        meter.peak("memory/peak_mb", peak_memory_mb(self.ranks.device))
        metrics = meter.reduce(self.ranks)
        count, tokens = int(metrics.pop("samples")), metrics.pop("tokens")
        metrics["rollout/weight_version"] = position.step
        metrics["tokens_per_s"] = tokens / metrics["time/step_s"]
        metrics["rollout/tokens_per_s"] = tokens / metrics["time/rollout_s"]
        metrics["update/tokens_per_s"] = metrics.pop("update/tokens") / metrics["time/update_s"]
        if "kl" in metrics:
            metrics["kl_coef"] = self.kl_control.coef
            self.kl_control.update(kl=metrics["kl"], n=count)
        return metrics

    def nonfinite_in_a_row(self) -> int:
        """Optimiser steps skipped since the last that was taken."""
        return self.updater.stepper.in_a_row

    def state(self) -> dict[str, Any]:
        """The controller's state."""
        return {"kl_control": self.kl_control.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from ``state``."""
        self.kl_control.load_state_dict(state["kl_control"])


def note_completions(meter: Meter, samples: Sequence[Sample]) -> None:
    """Lengths, and how the answers ended."""
    completions = [sample.completion for sample in samples if sample.completion is not None]
    lengths = [len(completion.token_ids) for completion in completions]
    reasons = [completion.finish_reason for completion in completions]
    meter.sum("samples", len(completions))
    meter.sum("tokens", sum(lengths))
    meter.mean("tokens/completion", sum(lengths), len(lengths))
    meter.mean("rollout/truncated_fraction", reasons.count("length"), len(reasons))
    meter.mean("rollout/aborted_fraction", reasons.count("abort"), len(reasons))
