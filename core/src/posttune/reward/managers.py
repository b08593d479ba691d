"""Reward managers: from the scores of a sample to its reward."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from pydantic import Field, model_validator

from posttune.config.base import NonNegativeFloat, Positive, Strict
from posttune.errors import DataError, UserError
from posttune.hookspecs import hookimpl
from posttune.nearest import nearest
from posttune.reward.loading import ObjectPath, load_object
from posttune.reward.scoring import dimensions, scalar
from posttune.types import Reward, Sample, Score

Scores = Mapping[str, Sequence[Score]]


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
    def reward_manager_combine(self, samples: Sequence[Sample], scores: Scores) -> list[Reward]:
        """One reward per sample. Raises UserError for a weight whose label is no reward's."""
        check_labels("weighted_sum", "weights", self.config.weights, scores)
        return [weighted_sum(each, self.config.weights) for each in by_sample(samples, scores)]


class GatedConfig(WeightedSumConfig):
    """Which reward opens the others."""

    gate: str = Field(description="Label of the reward that opens the others.")
    threshold: float = Field(1.0, description="The gate is open from this score on.")


class Gated:
    """As ``weighted_sum`` where the gate's score reaches the threshold; else the gate's part alone.

    Behind a closed gate the other scores do not matter, even one that is missing. Where the gate
    itself could not be scored, the sample has no reward.
    """

    Config = GatedConfig

    def __init__(self, config: GatedConfig) -> None:
        self.config = config

    @hookimpl
    def reward_manager_combine(self, samples: Sequence[Sample], scores: Scores) -> list[Reward]:
        """One reward per sample. Raises UserError for a label that is no reward's."""
        check_labels("gated", "gate", [self.config.gate], scores)
        check_labels("gated", "weights", self.config.weights, scores)
        return [self._reward(each) for each in by_sample(samples, scores)]

    def _reward(self, scores: Mapping[str, Score]) -> Reward:
        opened = scalar(scores[self.config.gate])
        if opened is None or opened >= self.config.threshold:
            return weighted_sum(scores, self.config.weights)
        dims = weighted_sum(scores, {}).dims
        return Reward(self.config.weights.get(self.config.gate, 1.0) * opened, dims=dims)


class OverlongConfig(WeightedSumConfig):
    """Where an answer becomes too long."""

    max_length: Positive = Field(description="Tokens; from here on the penalty is whole.")
    buffer: Positive = Field(description="Tokens before max_length over which the penalty grows.")
    penalty: NonNegativeFloat = Field(1.0, description="The whole penalty.")

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.buffer > self.max_length:
            raise ValueError(f"buffer {self.buffer} is longer than max_length {self.max_length}")
        return self


class Overlong:
    """As ``weighted_sum``, less DAPO's soft punishment of length (Yu et al. 2025, arXiv:2503.14476, eq. 13).

    With L the tokens of the completion: 0 up to max_length - buffer, then
    (max_length - buffer - L) / buffer, and -1 beyond max_length; times ``penalty``. It is reported as
    the dimension ``overlong``.
    """

    Config = OverlongConfig

    def __init__(self, config: OverlongConfig) -> None:
        self.config = config

    @hookimpl
    def reward_manager_combine(self, samples: Sequence[Sample], scores: Scores) -> list[Reward]:
        """One reward per sample. Raises DataError where a sample's tokens are not known."""
        check_labels("overlong", "weights", self.config.weights, scores)
        rewards = [weighted_sum(each, self.config.weights) for each in by_sample(samples, scores)]
        return [self._shortened(*pair) for pair in zip(samples, rewards, strict=True)]

    def _shortened(self, sample: Sample, reward: Reward) -> Reward:
        if reward.value is None:
            return reward
        if sample.completion is None:
            fix = "score a run's rollouts, or use weighted_sum"
            what = f"the tokens of sample {sample.name} are not known"
            raise DataError(what, who="reward_manager 'overlong'", fix=fix)
        punishment = self._punishment(len(sample.completion.token_ids))
        dims = {**reward.dims, "overlong": punishment}
        return replace(reward, value=reward.value + punishment, dims=dims)

    def _punishment(self, length: int) -> float:
        config = self.config
        free = config.max_length - config.buffer
        return -config.penalty * min(1.0, max(0.0, (length - free) / config.buffer))


class PerDimensionNoOptions(Strict):
    """Nothing to set: an estimator such as gdpo has the weights."""


class PerDimension:
    """Keeps every dimension for an estimator that normalises each by itself (GDPO, arXiv:2601.05242).

    A dimension that could not be scored is missing from its sample and masks nothing else. The value,
    which metrics and validation show, is the sum of those that were; a sample without any has none.
    """

    Config = PerDimensionNoOptions

    def __init__(self, config: PerDimensionNoOptions) -> None:
        self.config = config

    @hookimpl
    def reward_manager_combine(self, samples: Sequence[Sample], scores: Scores) -> list[Reward]:
        """One reward per sample."""
        return [self._reward(each) for each in by_sample(samples, scores)]

    def _reward(self, scores: Mapping[str, Score]) -> Reward:
        known = {label: score for label, score in scores.items() if score is not None}
        return weighted_sum(known, {}) if known else Reward(None)


class FunctionManagerConfig(Strict):
    """Which class."""

    path: ObjectPath = Field(description='"file.py:Class" or "package.module:Class".')
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the class.")


class FunctionManager:
    """A class of the user's with ``combine(samples, scores)``; a plain function of the two serves too.

    ``scores`` holds a list by the reward's label, one entry a sample. It returns, for each sample in
    order, a number, None (no reward), or a ``posttune.types.Reward``.
    """

    Config = FunctionManagerConfig

    def __init__(self, config: FunctionManagerConfig) -> None:
        self.config = config
        self._loaded: Any = None

    @hookimpl
    def reward_manager_combine(self, samples: Sequence[Sample], scores: Scores) -> Any:
        """What the class makes of them; numbers become rewards with the rewards' own dimensions."""
        if self._loaded is None:
            self._loaded = self._load()
        found = self._loaded(samples, scores)
        if not isinstance(found, list | tuple) or len(found) != len(samples):
            return found  # the facade refuses it, and says why
        parts = by_sample(samples, scores)
        return [_as_reward(*pair) for pair in zip(found, parts, strict=True)]

    def _load(self) -> Any:
        who = f"reward manager {self.config.path}"
        fix = "name a class with combine(samples, scores), or a function of the two"
        found = load_object(self.config.path)
        if inspect.isclass(found):
            try:
                found = found(**self.config.options)
            except TypeError as error:
                raise UserError(f"it cannot be created: {error}", who=who, fix="correct options") from error
        elif self.config.options:
            raise UserError("options are for a class, and it is none", who=who, fix="remove options")
        combine = getattr(found, "combine", found)
        if not callable(combine):
            raise UserError(f"it is a {type(found).__name__} without combine", who=who, fix=fix)
        return combine


def _as_reward(found: Any, scores: Mapping[str, Score]) -> Any:
    if found is None or (isinstance(found, int | float) and not isinstance(found, bool)):
        return Reward(None if found is None else float(found), dims=weighted_sum(scores, {}).dims)
    return found


def weighted_sum(scores: Mapping[str, Score], weights: Mapping[str, float]) -> Reward:
    """The weighted sum of a sample's scores, by label; None where one of them is."""
    dims = dict(pair for label, score in scores.items() for pair in dimensions(label, score))
    value = 0.0
    for label, score in scores.items():
        number = scalar(score)
        if number is None:
            return Reward(value=None, dims=dims)
        value += weights.get(label, 1.0) * number
    return Reward(value=value, dims=dims)


def by_sample(samples: Sequence[Sample], scores: Scores) -> list[dict[str, Score]]:
    """The scores of each sample, by label."""
    return [{label: each[i] for label, each in scores.items()} for i in range(len(samples))]


def check_labels(manager: str, option: str, named: Iterable[str], labels: Iterable[str]) -> None:
    """Raise UserError for a label in the options that is no reward's."""
    for label in named:
        if label not in labels:
            likely = nearest(label, labels)
            hint = f" (did you mean {likely!r}?)" if likely else ""
            raise UserError(
                f"options.{option} names {label!r}, and no reward has that label{hint}",
                who=f"reward_manager {manager!r}",
                fix=f"the rewards are {', '.join(labels)}",
            )
