"""The reward `function`: any function of the user's, by path."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pydantic import Field

from posttune.config.models import Strict
from posttune.errors import UserError
from posttune.hookspecs import hookimpl
from posttune.nearest import nearest
from posttune.reward.calls import SIGNATURES, Answers, Binding, bind
from posttune.reward.loading import ObjectPath, load_object
from posttune.reward.scoring import TOTAL
from posttune.types import Needs, Sample, Score


class FunctionConfig(Strict):
    """Which function, and how its dimensions weigh."""

    path: ObjectPath = Field(description='"file.py:name" or "package.module:name".')
    weights: dict[str, float] | None = Field(
        None,
        description="Weight of each dimension of a dict; the reward is the weighted sum (else the sum).",
    )


class FunctionReward:
    """Scores with a function that takes, by name, what it needs of a sample.

    ``(prompt, response)``, ``(prompt, response, reference)`` and data columns by name; or
    ``(samples)``, all at once. It may be async. It returns a number, a dict of dimensions, or None
    (a list of them where it takes samples). A class with ``compute_reward`` serves too. A relative
    file is looked for in the working folder, then beside the configuration. The file is run once per
    process, with the user's rights: this is no sandbox.
    """

    Config = FunctionConfig

    def __init__(self, config: FunctionConfig) -> None:
        self.config = config
        self._bound: Binding | None = None

    @classmethod
    def of(
        cls, function: Callable[..., Any], path: str, weights: Mapping[str, float] | None = None
    ) -> FunctionReward:
        """The reward of a function that is at hand; ``path`` only names it. Raises UserError."""
        reward = cls(FunctionConfig(path=path, weights=dict(weights) if weights is not None else None))
        reward._bound = bind(function, reward._who)
        return reward

    @hookimpl
    def reward_needs(self) -> Needs:
        """Loads the function, and says which columns it takes without a default."""
        return self._binding().needs

    @hookimpl
    def reward_score(self, samples: Sequence[Sample]) -> Answers:
        """The function's scores, in order."""
        answers = self._binding().score(samples)
        if inspect.isawaitable(answers):
            return self._weighted_later(answers)
        return self._weighted(answers)

    def _binding(self) -> Binding:
        if self._bound is None:
            self._bound = bind(self._function(), self._who)
        return self._bound

    @property
    def _who(self) -> str:
        return f"reward function {self.config.path}"

    def _function(self) -> Any:
        found = load_object(self.config.path)
        if hasattr(found, "compute_reward"):
            judge: Any = found() if inspect.isclass(found) else found
            return judge.compute_reward
        if not callable(found) or inspect.isclass(found):
            raise UserError(
                f"it is a {type(found).__name__}, not a function",
                who=self._who,
                fix=f"name a function {SIGNATURES}, or a class with compute_reward",
            )
        return found

    async def _weighted_later(self, answers: Awaitable[Sequence[Score]]) -> Sequence[Score]:
        return self._weighted(await answers)

    def _weighted(self, answers: Sequence[Score]) -> Sequence[Score]:
        weights = self.config.weights
        if weights is None or not isinstance(answers, list | tuple):  # what is neither, the facade refuses
            return answers
        return [self._total(answer, weights) for answer in answers]

    def _total(self, answer: Score, weights: Mapping[str, float]) -> Score:
        """The dimensions and, as ``total``, what they amount to."""
        if answer is None:
            return None
        if not isinstance(answer, Mapping):
            raise UserError(
                f"options.weights needs a dict of dimensions, and it returned a {type(answer).__name__}",
                who=self._who,
                fix="return a dict, or remove the weights",
            )
        for name in [*answer, *weights]:
            if name not in weights or name not in answer:
                raise self._mismatch(name, answer, weights)
        return {**answer, TOTAL: sum(weights[name] * value for name, value in answer.items())}

    def _mismatch(self, name: str, answer: Mapping[str, float], weights: Mapping[str, float]) -> UserError:
        missing, others = ("weight", weights) if name in answer else ("dimension", answer)
        likely = nearest(name, others)
        hint = f" (did you mean {likely!r}?)" if likely else ""
        both = f"it returned {', '.join(answer)}, options.weights has {', '.join(weights)}"
        what = f"{name!r} has no {missing}{hint}: {both}"
        return UserError(what, who=self._who, fix="give every dimension a weight; 0 only logs it")
