"""The answers of a step: prompts, completions and rewards, and which of them are worth an update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from posttune.distributed.ranks import Ranks
from posttune.facade import RewardManager, Rewards, RolloutEngine, Scoring
from posttune.rollout.requests import make_samples
from posttune.trainer._judge import Judged, judge, note_rewards
from posttune.trainer._prompts import Prompts, PromptStream
from posttune.trainer.loop import Position
from posttune.trainer.metrics import Meter
from posttune.types import Sample, Sampling

log = logging.getLogger("posttune.trainer")


@dataclass(frozen=True)
class Answers:
    """What a step learns from: this rank's samples, prompt by prompt."""

    prompts: Prompts
    samples: list[Sample]
    judged: Judged
    taken: int  # rows of the stream that were used, over all ranks
    baselines: Tensor | None = None  # float64 [S], reward of the greedy answer to each one's prompt

    def joined(self, other: Answers) -> Answers:
        """Both, one behind the other."""
        return Answers(
            self.prompts.joined(other.prompts),
            self.samples + other.samples,
            self.judged.joined(other.judged),
            self.taken + other.taken,
        )

    def only(self, groups: Collection[Hashable], all_ids: list[str]) -> Answers:
        """Those to the prompts ``groups``; ``all_ids`` are those of all ranks."""
        rows = [row for row, sample in enumerate(self.samples) if sample.group in groups]
        return replace(
            self,
            prompts=self.prompts.only(groups, all_ids),
            samples=[self.samples[row] for row in rows],
            judged=self.judged.only(rows),
        )


@dataclass(frozen=True)
class Begun:
    """Answers whose rewards may still be on their way. ``answers`` waits for them, once."""

    prompts: Prompts
    samples: list[Sample]
    answers: Callable[[], Answers]


@dataclass(frozen=True)
class Collector:
    """Answers and judges the prompts of a step. Every rank does so for its share of them."""

    engine: RolloutEngine
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    stream: PromptStream
    rewards: Rewards
    manager: RewardManager
    ranks: Ranks
    greedy: bool  # whether the estimator compares with the greedy answer
    drop: bool  # whether prompts with equal rewards are left out
    refills: int  # rounds of further prompts in the place of those

    def begin(self, position: Position, meter: Meter) -> Begun:
        """Answer the prompts of the step that begins at ``position``; the engine sleeps afterwards.

        The rewards are computed meanwhile and go on after the return, except where prompts are chosen
        by them.
        """
        if not self.drop:
            return self._all(position, meter)
        answers = self._chosen(position, meter)
        return Begun(answers.prompts, answers.samples, lambda: answers)

    def _all(self, position: Position, meter: Meter) -> Begun:
        prompts = self.stream.take(position.consumed)
        samples = self._answer(prompts, meter)
        scoring = self.rewards.submit(samples)
        greedy = self._answer_greedily(prompts, meter)
        greedy_scoring = self.rewards.submit(greedy) if greedy else None
        self.engine.sleep()

        def answers() -> Answers:
            found = self._judged(prompts, samples, meter, scoring)
            return replace(found, baselines=self._baselines(greedy, meter, greedy_scoring))

        return Begun(prompts, samples, answers)

    def _chosen(self, position: Position, meter: Meter) -> Answers:
        """Rounds until there are enough prompts with unequal rewards, or no refill is left."""
        answers, rounds = self._round(position.consumed, None, meter), 0
        while (missing := self.stream.count - len(answers.prompts.all_ids)) and rounds < self.refills:
            more = self._round(position.consumed + answers.taken, missing, meter)
            answers, rounds = answers.joined(more), rounds + 1
        self._report(position, missing, rounds, meter)
        greedy = self._answer_greedily(answers.prompts, meter)
        self.engine.sleep()
        return replace(answers, baselines=self._baselines(greedy, meter))

    def _round(self, start: int, count: int | None, meter: Meter) -> Answers:
        """Answers to a step's prompts, or to ``count``, from ``start`` on, less those with equal rewards."""
        prompts = self.stream.take(start, count)
        answers = self._judged(prompts, self._answer(prompts, meter), meter)
        groups = unequal_groups(answers.samples, answers.judged)
        local = [request.id for request in prompts.requests if request.id in groups]
        return answers.only(groups, list(chain.from_iterable(self.ranks.all_objects(local))))

    def _report(self, position: Position, missing: int, rounds: int, meter: Meter) -> None:
        meter.peak("rollout/refills", rounds)
        meter.peak("rollout/groups_kept", self.stream.count - missing)
        if missing and self.ranks.main:
            log.warning(
                "step %d goes on with %d of %d prompts after %d refills; the others had equal rewards",
                position.step + 1,
                self.stream.count - missing,
                self.stream.count,
                rounds,
            )

    def _answer(self, prompts: Prompts, meter: Meter, sampling: Sampling | None = None) -> list[Sample]:
        with meter.timed("rollout"):
            completions = self.ranks.agreed(self.engine.generate(prompts.requests, sampling or self.sampling))
        return make_samples(prompts.rows, prompts.requests, completions, self.tokenizer, prompts.origins)

    def _answer_greedily(self, prompts: Prompts, meter: Meter) -> list[Sample]:
        """One answer a prompt, where the estimator compares with it."""
        if not self.greedy:
            return []
        greedy = replace(self.sampling, n=1, temperature=0.0, top_p=1.0, top_k=0, logprobs=False)
        return self._answer(prompts, meter, greedy)

    def _judged(
        self, prompts: Prompts, samples: list[Sample], meter: Meter, begun: Scoring | None = None
    ) -> Answers:
        judged = self._waited(samples, meter, begun)
        note_rewards(meter, judged)
        note_completions(meter, samples)
        constant = len(prompts.requests) - len(unequal_groups(samples, judged))
        meter.mean("rollout/constant_groups_fraction", constant, len(prompts.requests))
        return Answers(prompts, samples, judged, taken=prompts.taken)

    def _baselines(
        self, greedy: Sequence[Sample], meter: Meter, begun: Scoring | None = None
    ) -> Tensor | None:
        if not self.greedy:
            return None
        values = self._waited(greedy, meter, begun).values(self.ranks.device)
        return values.repeat_interleave(self.sampling.n)

    def _waited(self, samples: Sequence[Sample], meter: Meter, begun: Scoring | None) -> Judged:
        """The rewards, and how long they took and were waited for."""
        with meter.timed("reward_wait"):
            begun = begun or self.rewards.submit(samples)
            judged = self.ranks.agreed(judge(samples, self.rewards, self.manager, begun))
        meter.took("reward", begun.seconds)
        return judged


def unequal_groups(samples: Sequence[Sample], judged: Judged) -> set[Hashable]:
    """The prompts whose samples have at least two different rewards; unscorable ones do not count."""
    values: dict[Hashable, set[float]] = {}
    for sample, reward in zip(samples, judged.rewards, strict=True):
        if reward.value is not None:
            values.setdefault(sample.group, set()).add(reward.value)
    return {group for group, found in values.items() if len(found) > 1}


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
