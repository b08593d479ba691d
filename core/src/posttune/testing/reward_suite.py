"""Conformance of a reward.

class TestMine(RewardSuite):
    name = "mine"
    reference = "42"                 # what the samples' reference is; None: it needs none
    columns = {"topic": "sums"}      # columns of the data that it reads

``requires``: ``deterministic`` (equal samples score alike, in every executor), ``independent`` (a score
does not depend on the other samples), ``unscorable`` (without its reference it answers None, never a
number), ``hang`` (``hanging()`` gives a sample that takes for ever, and is ended).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

from posttune.config.base import RewardRef
from posttune.testing._streams import stdout_of
from posttune.testing.plugin_suite import PluginSuite
from posttune.types import Completion, Sample, Score

RESPONSES = (
    "The answer is 42.",
    "",
    " ",
    "\n\n\t",
    "42",
    "I do not know",
    "#### 7",
    "naïve café 日本語 🙂👩‍👩‍👧 العربية",
    "\u202eabc\u2066 \u200b\ufeff",
    "a\x00b\x07c\r\n",
    "<|endoftext|></s><think></think>",
    '{"json": [1, 2, {"deep": null}]}',
    "\\boxed{\\frac{1}{2}} $$\\int_0^1 x\\,dx$$",
    "𝟙𝟚 ٣٤ Ⅷ ½ 1e309 -0 nan inf",
    "((((" * 50,
)
LONG = "so we add 1 and 2 and get 3, and " * 3000
DEADLINE = 60.0


class RewardSuite(PluginSuite):
    """What every reward must do."""

    kind: ClassVar[str] = "reward"
    requires = frozenset({"deterministic", "independent"})
    prompt: str = "What is 40 + 2?"
    reference: str | list[str] | None = "42"
    columns: Mapping[str, Any] = {}
    responses: Sequence[str] = RESPONSES

    def samples(self) -> list[Sample]:
        """Answers of every sort to one prompt."""
        return [self.sample(text, index) for index, text in enumerate(self.responses)]

    def sample(self, response: str, index: int = 0) -> Sample:
        """One answer."""
        return Sample(
            id=f"s{index}",
            group="g",
            prompt=self.prompt,
            response=response,
            reference=self.reference,
            columns=copy.deepcopy(dict(self.columns)),
            completion=_completion(response, index),
        )

    def hanging(self) -> Sample | None:
        """A sample on which the reward never ends, where one is known."""
        return None

    def rewards(self, **execution: Any) -> Any:
        """The reward behind the facade, executed as said."""
        from posttune.facade.rewards import Rewards

        ref = RewardRef(name=self.name or "planted", options=dict(self.options), **execution)
        return Rewards([self.member()], [ref])

    def score(self, samples: Sequence[Sample], **execution: Any) -> list[Score]:
        """The scores of samples."""
        rewards = self.rewards(**execution)
        try:
            (found,) = rewards.score(samples).values()
        finally:
            rewards.close()
        scores: list[Score] = found
        return scores

    def test_one_score_for_each_sample(self) -> None:
        """As many as samples, each a finite number, a dict of them, or None."""
        samples = self.samples()
        assert len(self.score(samples)) == len(samples)

    def test_order_is_that_of_the_samples(self) -> None:
        """Samples in another order get the same scores, in that order."""
        if "independent" in self.requires:
            samples = self.samples()
            assert _same(self.score(samples[::-1])[::-1], self.score(samples))

    def test_a_score_does_not_depend_on_its_neighbours(self) -> None:
        """One sample alone scores as it does among others."""
        if "independent" in self.requires:
            samples = self.samples()
            together = self.score(samples)
            for index in (0, len(samples) // 2, len(samples) - 1):
                assert _same(self.score([samples[index]]), [together[index]]), samples[index].response

    def test_it_repeats_itself(self) -> None:
        """Equal samples score alike, in one instance and in two."""
        if "deterministic" in self.requires:
            rewards, samples = self.rewards(), self.samples()
            (first,), (second,) = rewards.score(samples).values(), rewards.score(samples).values()
            assert _same(first, second)
            assert _same(first, self.score(samples))

    def test_no_samples(self) -> None:
        """An empty batch has no scores, and is no error."""
        import inspect

        from posttune.execution.inline import settled

        answers = self.make().reward_score(samples=[])
        if inspect.isawaitable(answers):
            answers = settled(answers)
        assert list(answers) == []

    def test_empty_response(self) -> None:
        """A response without a character is scored or None."""
        assert len(self.score([self.sample("")])) == 1

    def test_long_response(self) -> None:
        """A response of 100,000 characters ends within a minute, in a process that could be killed."""
        rewards = self.rewards(executor="process", workers=1, timeout=DEADLINE)
        try:
            (found,) = rewards.score([self.sample(LONG)]).values()
            (stats,) = rewards.stats.values()
            assert stats.timeouts == 0, f"it took longer than {DEADLINE:g} s"
        finally:
            rewards.close()
        assert len(found) == 1

    def test_it_works_in_threads(self) -> None:
        """Several at a time, off the main thread: no signals, no state that they share."""
        if "deterministic" in self.requires and "independent" in self.requires:
            samples, rewards = self.samples(), self.rewards()
            (expected,) = rewards.score(samples).values()
            with ThreadPoolExecutor(4) as pool:
                found = list(pool.map(lambda each: next(iter(rewards.score([each]).values())), samples * 3))
            assert _same([each[0] for each in found], expected * 3)

    def test_every_executor_scores_alike(self) -> None:
        """Inline, in threads and in worker processes, to which nothing is sent but its options."""
        if "deterministic" in self.requires:
            samples = self.samples()[:6]
            expected = self.score(samples)
            for executor in ("thread", "process"):
                found = self.score(samples, executor=executor, workers=2, timeout=DEADLINE)
                assert _same(found, expected), executor

    def test_it_leaves_samples_alone(self) -> None:
        """Samples are shared by all rewards: nothing is written into their columns."""
        samples = self.samples()
        before = copy.deepcopy(samples)
        self.score(samples)
        assert samples == before

    def test_needs_are_true(self) -> None:
        """The columns that it says to need are those that the suite gives; it scores what has them."""
        needs = next(iter(self.rewards().needs.values()))
        missing = set(needs.columns) - self.columns.keys()
        assert not missing, f"it needs {', '.join(sorted(missing))}: put them into columns = {{...}}"
        assert not (needs.reference and self.reference is None), "it needs a reference: give one"

    def test_unscorable_is_not_zero(self) -> None:
        """Without the reference that it needs a sample is refused or has no score: 0 would teach."""
        if "unscorable" in self.requires:
            from posttune.errors import PosttuneError

            try:
                (score,) = self.score([replace(self.sample("42"), reference=None)])
            except PosttuneError:
                return  # refused with a message: no number either
            assert score is None

    def test_scoring_prints_nothing(self) -> None:
        """Standard output belongs to the command."""
        with stdout_of() as output:
            self.score(self.samples())
        assert output.text == ""

    def test_a_hang_is_ended(self) -> None:
        """The sample that never ends is unscorable after its time; the next one scores right."""
        sample = self.hanging()
        if "hang" not in self.requires:
            return
        assert sample is not None, "requires hang: let hanging() give the sample"
        good = self.sample(self.responses[0])
        (expected,) = self.score([good])
        rewards = self.rewards(executor="process", workers=1, timeout=10.0, on_error="mask")
        try:
            (first,) = rewards.score([sample]).values()
            (second,) = rewards.score([good]).values()
        finally:
            rewards.close()
        assert first == [None]
        assert _same(second, [expected])


def _completion(response: str, index: int) -> Completion:
    """As a rollout would tell it: here every word is a token."""
    tokens = tuple(range(3, 3 + len(response.split()))) or (2,)
    return Completion(f"r{index}", 0, tokens, tuple(-0.5 for _ in tokens), "stop", 0)


def _same(left: Sequence[Score], right: Sequence[Score]) -> bool:
    return len(left) == len(right) and all(map(_close, left, right))


def _close(left: Score, right: Score) -> bool:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_close(left[key], right[key]) for key in left)
    if isinstance(left, Mapping) or isinstance(right, Mapping):
        return False
    if left is None or right is None:
        return left is right
    return math.isclose(left, right, rel_tol=1e-6, abs_tol=1e-9)
