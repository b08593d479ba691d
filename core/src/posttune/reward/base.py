"""The base class of rewards that judge one answer at a time. Importing it imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import BaseModel

from posttune.config.models import Strict
from posttune.hookspecs import hookimpl
from posttune.reward.calls import Answers, Binding, bind
from posttune.types import Needs, Sample


class NoOptions(Strict):
    """A reward without options."""


class BaseRewardFunction(ABC):
    """Subclass it and write ``compute_reward``: the class is a reward as it stands.

    In a script: ``MyReward().compute_reward(prompt="", response=text, reference=gold)``. As a plugin:
    an entry point of the group ``posttune.reward`` names the class. A ``Config`` (pydantic,
    ``extra="forbid"``) declares options, which ``self.config`` holds; in a script they are keyword
    arguments of the class.
    """

    Config: ClassVar[type[BaseModel]] = NoOptions

    def __init__(self, config: BaseModel | None = None, **options: Any) -> None:
        self.config: Any = self.Config(**options) if config is None else config

    @abstractmethod
    def compute_reward(self, prompt: str, response: str, reference: Any = None, **columns: Any) -> Any:
        """Judge one answer: a number, a dict of dimensions, or None where it cannot be judged.

        An override takes what it needs by name: ``prompt``, ``response``, ``reference`` (a string, a
        list of strings, or None), any data column, and ``**columns`` for the rest. It may be async.
        """

    @hookimpl
    def reward_needs(self) -> Needs:
        """The columns that ``compute_reward`` takes by name and without a default."""
        return self._binding.needs

    @hookimpl
    def reward_score(self, samples: Sequence[Sample]) -> Answers:
        """``compute_reward`` of each sample, in order."""
        return self._binding.score(samples)

    @property
    def _binding(self) -> Binding:
        return bind(self.compute_reward, f"{type(self).__name__}.compute_reward")
