"""Conformance of a reward manager.

class TestMine(RewardManagerSuite):
    name = "mine"
    options = {"gate": "first"}
    labels = ("first", "second")     # of the rewards whose scores it combines

``requires``: ``masking`` (a sample without any score gets no reward), ``independent`` (a reward does not
depend on the other samples), ``dimensions`` (scores may be dicts of dimensions).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from posttune.testing._streams import stdout_of
from posttune.testing.plugin_suite import PluginSuite
from posttune.types import Completion, Reward, Sample, Score

VALUES = (1.0, 0.0, 0.5, -2.0, 1e6, 1e-9, 0.3, -0.0)


class RewardManagerSuite(PluginSuite):
    """What every reward manager must do."""

    kind: ClassVar[str] = "reward_manager"
    requires = frozenset({"masking", "independent"})
    labels: Sequence[str] = ("first", "second")
    length: int = 5  # tokens of the longest completion

    def samples(self, count: int) -> list[Sample]:
        """Answers of 0, 1, 2 ... tokens."""
        return [self._sample(index) for index in range(count)]

    def _sample(self, index: int) -> Sample:
        tokens = tuple(range(index % (self.length + 1)))
        completion = Completion(f"r{index}", 0, tokens, tuple(-0.5 for _ in tokens), "stop", 0)
        return Sample(f"s{index}", f"g{index // 2}", "prompt", "word " * len(tokens), None, {}, completion)

    def scores(self, count: int) -> dict[str, list[Score]]:
        """Numbers of every size; no two labels have the same."""
        return {
            label: [VALUES[(index + 3 * place) % len(VALUES)] for index in range(count)]
            for place, label in enumerate(self.labels)
        }

    def combine(self, samples: Sequence[Sample], scores: Mapping[str, Sequence[Score]]) -> list[Reward]:
        """The rewards, as the facade checks them: one a sample, finite, parts that sum to the whole."""
        from posttune.facade.manager import RewardManager

        return RewardManager(self.member()).combine(samples, scores)

    def test_one_reward_for_each_sample(self) -> None:
        """Finite, and where it is given by token as many as tokens, with the same sum."""
        samples = self.samples(8)
        rewards = self.combine(samples, self.scores(8))
        assert len(rewards) == 8
        assert any(reward.value is not None for reward in rewards)

    def test_no_samples(self) -> None:
        """An empty step has no rewards, and is no error."""
        assert self.combine([], {label: [] for label in self.labels}) == []

    def test_order_is_that_of_the_samples(self) -> None:
        """Samples in another order get the same rewards, in that order."""
        samples, scores = self.samples(8), self.scores(8)
        turned = {label: list(column)[::-1] for label, column in scores.items()}
        assert _same(self.combine(samples[::-1], turned)[::-1], self.combine(samples, scores))

    def test_a_reward_does_not_depend_on_its_neighbours(self) -> None:
        """One sample alone gets what it gets among others."""
        if "independent" in self.requires:
            samples, scores = self.samples(8), self.scores(8)
            together = self.combine(samples, scores)
            for index in (0, 3, 7):
                alone = {label: [column[index]] for label, column in scores.items()}
                assert _same(self.combine([samples[index]], alone), [together[index]])

    def test_order_of_the_rewards_does_not_matter(self) -> None:
        """Scores come by label: the order of the configuration decides nothing."""
        samples, scores = self.samples(8), self.scores(8)
        turned = dict(reversed(scores.items()))
        assert _same(self.combine(samples, turned), self.combine(samples, scores))

    def test_scores_matter(self) -> None:
        """Other scores give other rewards."""
        samples = self.samples(8)
        zeros: dict[str, list[Score]] = {label: [0.0] * 8 for label in self.labels}
        assert not _same(self.combine(samples, self.scores(8)), self.combine(samples, zeros))

    def test_unscorable_is_no_number(self) -> None:
        """A sample that no reward could score gets no reward; its neighbours keep theirs."""
        if "masking" in self.requires:
            samples, scores = self.samples(8), self.scores(8)
            before = self.combine(samples, scores)
            for column in scores.values():
                column[3] = None
            after = self.combine(samples, scores)
            assert after[3].value is None
            assert _same([*after[:3], *after[4:]], [*before[:3], *before[4:]])

    def test_a_missing_score_is_survived(self) -> None:
        """One reward of several without a score: a finite reward, or none."""
        samples = self.samples(8)
        for label in self.labels:
            scores = self.scores(8)
            scores[label] = [None] * 8
            assert len(self.combine(samples, scores)) == 8

    def test_dimensions(self) -> None:
        """Scores that are dicts of dimensions."""
        if "dimensions" in self.requires:
            samples = self.samples(4)
            scores = {label: [{"a": 1.0, "b": 0.5}] * 4 for label in self.labels}
            assert len(self.combine(samples, scores)) == 4

    def test_empty_response(self) -> None:
        """A completion without a token gets a reward or none, and no reward by token."""
        (reward,) = self.combine(self.samples(1), self.scores(1))
        assert not reward.per_token

    def test_it_repeats_itself(self) -> None:
        """The same scores give the same rewards, in one instance and in two."""
        samples, scores, manager = self.samples(8), self.scores(8), self.make()
        first = manager.reward_manager_combine(**self._arguments(manager, samples, scores))
        second = manager.reward_manager_combine(**self._arguments(manager, samples, scores))
        assert _same(first, second)
        assert _same(first, self.combine(samples, scores))

    def test_it_leaves_its_input_alone(self) -> None:
        """Scores are logged after it: nothing is written into them."""
        samples, scores = self.samples(8), self.scores(8)
        before = copy.deepcopy((samples, scores))
        self.combine(samples, scores)
        assert (samples, scores) == before

    def test_combining_prints_nothing(self) -> None:
        """Standard output belongs to the command."""
        with stdout_of() as output:
            self.combine(self.samples(8), self.scores(8))
        assert output.text == ""

    def _arguments(self, manager: Any, samples: list[Sample], scores: Mapping[str, Any]) -> dict[str, Any]:
        import inspect

        taken = inspect.signature(manager.reward_manager_combine).parameters
        return {key: value for key, value in {"samples": samples, "scores": scores}.items() if key in taken}


def _same(left: Sequence[Reward], right: Sequence[Reward]) -> bool:
    return len(left) == len(right) and all(
        _close(one.value, two.value) for one, two in zip(left, right, strict=True)
    )


def _close(left: float | None, right: float | None) -> bool:
    if left is None or right is None:
        return left is right
    return math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-12)
