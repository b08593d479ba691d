"""The reward `length`: how near an answer's length is to a target, or how far it is over a limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from posttune.config.models import Positive, Strict
from posttune.errors import DataError
from posttune.hookspecs import hookimpl
from posttune.types import Needs, Sample


class LengthConfig(Strict):
    """Either a target or a limit."""

    target: Positive | None = Field(None, description="The length that scores 1.")
    limit: Positive | None = Field(None, description="The greatest length that scores 1.")
    tolerance: Positive | None = Field(
        None, description="Distance at which the score reaches 0; defaults to the target or limit itself."
    )
    unit: Literal["tokens", "characters"] = Field(
        "tokens", description="Tokens of the completion, its EOS included; or characters of the text."
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> LengthConfig:
        if (self.target is None) == (self.limit is None):
            raise ValueError("give either target or limit")
        return self


class LengthReward:
    """A score in 0..1 that falls linearly with the distance d from the aim: max(0, 1 - d / tolerance).

    With ``target``, d = |length - target|; with ``limit``, d = max(0, length - limit).
    """

    Config = LengthConfig

    def __init__(self, config: LengthConfig) -> None:
        self.config = config

    @hookimpl
    def reward_needs(self) -> Needs:
        """Nothing; each sample counts by itself."""
        return Needs(each=True)

    @hookimpl
    def reward_score(self, samples: Sequence[Sample]) -> list[float]:
        """One score a sample. Raises DataError where tokens are to be counted and are not known."""
        return [self._score(self._length(sample)) for sample in samples]

    def _score(self, length: int) -> float:
        config = self.config
        if config.target is not None:
            aim, distance = config.target, abs(length - config.target)
        else:
            assert config.limit is not None
            aim, distance = config.limit, max(0, length - config.limit)
        return max(0.0, 1.0 - distance / (config.tolerance or aim))

    def _length(self, sample: Sample) -> int:
        if self.config.unit == "characters":
            return len(sample.response)
        if sample.completion is None:
            raise DataError(
                f"the tokens of sample {sample.name} are not known",
                who="reward 'length'",
                fix="set options.unit to characters, or score a run's rollouts",
            )
        return len(sample.completion.token_ids)
