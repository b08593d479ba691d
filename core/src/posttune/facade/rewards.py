"""All rewards of a stage: each configured instance is called on its own, in order."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

from posttune.errors import PosttuneError
from posttune.facade.values import as_list, as_number, shown
from posttune.pipeline import Member
from posttune.types import Needs, Sample, Score

HOOK = "reward_score"


@dataclass(frozen=True)
class RewardStats:
    """What one reward did in the last call of ``Rewards.score``."""

    scored: int
    unscorable: int  # None and NaN
    nan: int
    seconds: float


class Rewards:
    """The rewards of a stage. ``stats`` tells of the last call, by label."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = tuple(members)
        self.needs: dict[str, Needs] = {member.label: _needs(member) for member in self._members}
        self.stats: dict[str, RewardStats] = {}

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels, in the order of the configuration."""
        return tuple(member.label for member in self._members)

    def score(self, samples: Sequence[Sample]) -> dict[str, list[Score]]:
        """The scores of every reward by label: a float, a dict of floats or None per sample, in order.

        NaN becomes None, the unscorable sample. Raises PluginCallError and PluginReturnError,
        which name the label and the sample.
        """
        return {member.label: self._score(member, samples) for member in self._members}

    def _score(self, member: Member, samples: Sequence[Sample]) -> list[Score]:
        began = time.perf_counter()
        answers = _answers(member, samples) if samples else []
        seconds = time.perf_counter() - began
        if len(answers) != len(samples):
            raise member.wrong(HOOK, f"{len(answers)} scores for {len(samples)} samples")
        scores = [_score(member, sample, answer) for sample, answer in zip(samples, answers, strict=True)]
        unscorable = scores.count(None)
        nan = unscorable - sum(answer is None for answer in answers)
        self.stats[member.label] = RewardStats(len(scores) - unscorable, unscorable, nan, seconds)
        return scores


def _answers(member: Member, samples: Sequence[Sample]) -> list[Any]:
    about = f" (label {member.label!r}, {len(samples)} samples, the first is {samples[0].id})"
    result = member.call_about(HOOK, about, samples=samples)
    if inspect.isawaitable(result):
        result = _awaited(member, result, about)
    answers = as_list(result)
    if answers is None:
        raise member.wrong(HOOK, f"{shown(result)}, not a list of scores")
    return answers


def _awaited(member: Member, awaitable: Awaitable[object], about: str) -> object:
    try:
        return _run(awaitable)
    except (KeyboardInterrupt, PosttuneError):
        raise
    except BaseException as error:
        raise member.failed(HOOK, error, about) from error


def _run(awaitable: Awaitable[object]) -> object:
    """The result of an awaitable, in a thread of its own where a loop runs already (a notebook)."""

    async def settle() -> object:
        return await awaitable

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(settle())
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, settle()).result()


def _needs(member: Member) -> Needs:
    if not member.implements("reward_needs"):
        return Needs()
    needs = member.call("reward_needs")
    if not isinstance(needs, Needs):
        raise member.wrong("reward_needs", f"{shown(needs)}, not Needs")
    return needs


def _score(member: Member, sample: Sample, answer: object) -> Score:
    if answer is None:
        return None
    if isinstance(answer, Mapping):
        return _dimensions(member, sample, answer)
    number = as_number(answer)
    if number is None:
        raise member.wrong(HOOK, f"{shown(answer)} for sample {sample.id} (label {member.label!r})")
    return None if math.isnan(number) else number


def _dimensions(member: Member, sample: Sample, answer: Mapping[Any, object]) -> Score:
    """A dict of dimensions; one NaN makes the sample unscorable."""
    numbers: dict[str, float] = {}
    for name, value in answer.items():
        number = as_number(value)
        if number is None or not isinstance(name, str):
            where = f"for dimension {name!r} of sample {sample.id} (label {member.label!r})"
            raise member.wrong(HOOK, f"{shown(value)} {where}")
        numbers[name] = number
    if not numbers:
        raise member.wrong(HOOK, f"an empty dict for sample {sample.id} (label {member.label!r})")
    return None if any(map(math.isnan, numbers.values())) else cast("Score", numbers)
