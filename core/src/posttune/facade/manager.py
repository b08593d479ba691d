"""The reward manager: the scores of a sample become its reward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from posttune.facade.values import as_number, shown
from posttune.pipeline import Member
from posttune.types import Reward, Sample, Score

HOOK = "reward_manager_combine"
TOLERANCE = 1e-6


class RewardManager:
    """Combines scores."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def combine(self, samples: Sequence[Sample], scores: Mapping[str, Sequence[Score]]) -> list[Reward]:
        """One reward per sample, in order. ``scores`` holds one score per sample, by label.

        No samples are no exception: a manager refuses a label that it does not know before any sample.
        """
        rewards = self._member.call(HOOK, samples=samples, scores=scores)
        if not isinstance(rewards, list | tuple):
            raise self._member.wrong(HOOK, f"{shown(rewards)}, not a list of Reward")
        if len(rewards) != len(samples):
            raise self._member.wrong(HOOK, f"{len(rewards)} rewards for {len(samples)} samples")
        for sample, reward in zip(samples, rewards, strict=True):
            fault = _fault(sample, reward)
            if fault:
                raise self._member.wrong(HOOK, f"{fault} for sample {sample.id}")
        return list(rewards)


def _fault(sample: Sample, reward: object) -> str:
    if not isinstance(reward, Reward):
        return f"{shown(reward)}, not a Reward,"
    if reward.value is not None and not _finite(reward.value):
        return f"the value {shown(reward.value)}"
    bad = [name for name, value in reward.dims.items() if not _finite(value)]
    if bad:
        return f"{shown(reward.dims[bad[0]])} as dimension {bad[0]!r}"
    return _token_fault(sample, reward) if reward.per_token is not None else ""


def _token_fault(sample: Sample, reward: Reward) -> str:
    tokens = reward.per_token or ()
    if not all(map(_finite, tokens)):
        return "a reward per token that is no finite number"
    if reward.value is None:
        return "rewards per token without a value"
    if sample.completion is not None and len(tokens) != len(sample.completion.token_ids):
        return f"{len(tokens)} rewards per token for {len(sample.completion.token_ids)} tokens"
    if not math.isclose(math.fsum(tokens), reward.value, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
        return f"rewards per token that sum to {math.fsum(tokens):g} with the value {reward.value:g}"
    return ""


def _finite(value: object) -> bool:
    number = as_number(value)
    return number is not None and not math.isnan(number)
