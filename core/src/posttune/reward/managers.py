"""Reward managers: from the scores of a sample to its reward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pydantic import Field

from posttune.config.models import Strict
from posttune.errors import UserError
from posttune.hookspecs import hookimpl
from posttune.nearest import nearest
from posttune.reward.scoring import dimensions, scalar
from posttune.types import Reward, Sample, Score


class WeightedSumConfig(Strict):
    """How the rewards weigh."""

    weights: dict[str, float] = Field(
        default_factory=dict, description="Weight by the reward's label; 1 where none is given."
    )


class WeightedSum:
    """The sum of weight x score over all rewards.

    A dict of dimensions counts by its ``total``, else by the sum of its dimensions. A sample that one
    reward could not score has no reward: its value is None, and training masks it. Dimensions are
    reported unweighted, as ``label`` or ``label/dimension``.
    """

    Config = WeightedSumConfig

    def __init__(self, config: WeightedSumConfig) -> None:
        self.config = config

    @hookimpl
    def reward_manager_combine(
        self, samples: Sequence[Sample], scores: Mapping[str, Sequence[Score]]
    ) -> list[Reward]:
        """One reward per sample. Raises UserError for a weight whose label is no reward's."""
        self._check_labels(scores)
        return [self._reward({label: each[i] for label, each in scores.items()}) for i in range(len(samples))]

    def _reward(self, scores: Mapping[str, Score]) -> Reward:
        dims = dict(pair for label, score in scores.items() for pair in dimensions(label, score))
        value = 0.0
        for label, score in scores.items():
            number = scalar(score)
            if number is None:
                return Reward(value=None, dims=dims)
            value += self.config.weights.get(label, 1.0) * number
        return Reward(value=value, dims=dims)

    def _check_labels(self, labels: Iterable[str]) -> None:
        for label in self.config.weights:
            if label not in labels:
                likely = nearest(label, labels)
                hint = f" (did you mean {likely!r}?)" if likely else ""
                raise UserError(
                    f"options.weights names {label!r}, and no reward has that label{hint}",
                    who="reward_manager 'weighted_sum'",
                    fix=f"the rewards are {', '.join(labels)}",
                )
