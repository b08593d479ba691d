"""NUMERICS.md part 6: defects found in other libraries. Each is a test here."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from posttune.advantage import functions
from posttune.advantage.whiten import whiten
from posttune.testing._batches import one_rank, packed
from posttune.types import AdvantageBatch, Advantages
from torch import Tensor

GROUP_ESTIMATORS: dict[str, Callable[[AdvantageBatch], Advantages]] = {
    "grpo": functions.grpo,
    "grpo eps 0": lambda batch: functions.grpo(batch, eps=0.0),
    "grpo eps 1e-9": lambda batch: functions.grpo(batch, eps=1e-9),
    "grpo ddof 0": lambda batch: functions.grpo(batch, ddof=0),
    "grpo batch": lambda batch: functions.grpo(batch, scale="batch"),
    "dr_grpo": lambda batch: functions.grpo(batch, scale="none"),
    "rloo": functions.rloo,
    "rloo standardised": lambda batch: functions.rloo(batch, standardise=True),
    "opo": functions.opo,
    "gpg": functions.gpg,
    "grpo_passk": functions.grpo_passk,
    "gdpo unwhitened": lambda batch: functions.gdpo(batch, whiten="none"),
    "gdpo": functions.gdpo,
    "reinforce_plus_plus_baseline": functions.reinforce_plus_plus_baseline,
}
VALUES = [0.0, 1.0, 0.1, 0.3, 0.6, 0.7, 0.95, 1 / 3, -2.7]
SIZES = [2, 3, 4, 5, 7, 8, 11, 16, 32, 33, 64]

parametrized = pytest.mark.parametrize("estimator", GROUP_ESTIMATORS.values(), ids=GROUP_ESTIMATORS)


def batch_of(
    scores: Sequence[float] | Tensor, groups: Sequence[Hashable], lengths: Sequence[int] | None = None
) -> AdvantageBatch:
    sizes = [1] * len(groups) if lengths is None else lengths
    tensor = torch.as_tensor(scores) if isinstance(scores, Tensor) else torch.tensor(scores).double()
    rewards = torch.zeros(sum(sizes), dtype=torch.float64)
    return AdvantageBatch(packed(sizes, groups), rewards, tensor, {}, None, None, one_rank)


@parametrized
def test_a_constant_group_gives_exactly_zero(estimator: Callable[[AdvantageBatch], Advantages]) -> None:
    for value in VALUES:
        for size in SIZES:
            result = estimator(batch_of([value] * size, ["g"] * size)).advantages
            assert result.tolist() == [0.0] * size, (value, size)


def test_a_constant_group_beside_others_gives_exactly_zero() -> None:
    scores = [0.7] * 8 + [1.0, 0.0, 0.3, 0.3]
    for name, estimator in GROUP_ESTIMATORS.items():
        result = estimator(batch_of(scores, ["a"] * 8 + ["b"] * 4)).advantages
        whitened = name in ("gdpo", "reinforce_plus_plus_baseline", "rloo standardised")
        # Over the whole batch a group's 0 is as good as its place in it: these only stay small.
        limit = 0.3 if whitened else 0.0
        assert float(result[:8].abs().max()) <= limit, name
        assert bool(result[8:].any()), name


def test_equal_scores_across_a_batch_whiten_to_exactly_zero() -> None:
    for value in VALUES:
        for size in SIZES:
            mask = torch.ones(size, dtype=torch.bool)
            assert not bool(whiten(torch.full((size,), value).double(), mask, one_rank).any())


@parametrized
def test_nan_in_one_reward_leaves_the_others(estimator: Callable[[AdvantageBatch], Advantages]) -> None:
    groups = ["a"] * 4 + ["b"] * 3
    with_nan = estimator(batch_of([1.0, 0.0, math.nan, 0.5, 1.0, 0.2, 0.0], groups)).advantages
    without = estimator(batch_of([1.0, 0.0, 0.5, 1.0, 0.2, 0.0], groups[1:])).advantages
    assert with_nan[2] == 0
    torch.testing.assert_close(with_nan[[0, 1, 3, 4, 5, 6]], without)


@parametrized
def test_a_group_that_is_all_nan_gives_zero(estimator: Callable[[AdvantageBatch], Advantages]) -> None:
    result = estimator(batch_of([math.nan] * 3 + [1.0, 0.0], ["a"] * 3 + ["b"] * 2)).advantages
    assert result[:3].tolist() == [0.0] * 3
    assert bool(result.isfinite().all())


@parametrized
def test_an_empty_response_gives_its_peers_nothing(
    estimator: Callable[[AdvantageBatch], Advantages],
) -> None:
    """One other sample remains: verl gives it -0.707, here a group of one gets 0."""
    batch = batch_of([5.0, 1.0], ["a", "a"], lengths=[2, 3])
    layout = replace(batch.packed, mask=torch.tensor([False, False, True, True, True]))
    assert estimator(replace(batch, packed=layout)).advantages.tolist() == [0.0] * 5
    no_tokens = batch_of([5.0, 1.0], ["a", "a"], lengths=[0, 3])
    assert estimator(no_tokens).advantages.tolist() == [0.0] * 3


@parametrized
@pytest.mark.parametrize("ids", [(-3, -1), (("x", 1), None), (b"a", "a"), (1.5, 10**30)])
def test_groups_are_named_by_any_hashable(
    estimator: Callable[[AdvantageBatch], Advantages], ids: tuple[Hashable, Hashable]
) -> None:
    scores = [1.0, 0.3, 0.0, 0.5, 0.9]
    plain = estimator(batch_of(scores, ["a", "b", "a", "b", "b"])).advantages
    named = estimator(batch_of(scores, [ids[0], ids[1], ids[0], ids[1], ids[1]])).advantages
    assert torch.equal(plain, named)


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", "gdpo"]
)
def test_one_policy_for_groups_of_one(name: str) -> None:
    """zero by default, raw when asked for, and the same in every estimator."""
    function = getattr(functions, "grpo" if name == "dr_grpo" else name)
    special: dict[str, dict[str, Any]] = {
        "dr_grpo": {"scale": "none"},
        "gdpo": {"whiten": "none"},
        "reinforce_plus_plus_baseline": {"whiten": False},
    }
    options = special.get(name, {})
    batch = batch_of([1.0, 0.5, 2.0], ["a", "a", "alone"])
    for singleton in ("refuse", "zero"):
        assert function(batch, singleton=singleton, **options).advantages[2] == 0
    assert function(batch, singleton="raw", **options).advantages[2].item() == pytest.approx(2.0, abs=1e-5)


def test_pass_at_k_of_one_is_zero() -> None:
    assert functions.grpo_passk(batch_of([3.0], ["a"])).advantages.tolist() == [0.0]


def test_whitening_leaves_masked_places_zero() -> None:
    values = torch.tensor([1.0, 98.0, 3.0, math.nan])
    mask = torch.tensor([True, False, True, False])
    for shift in (True, False):
        result = whiten(values, mask, one_rank, shift_mean=shift)
        assert result[~mask].tolist() == [0.0, 0.0]
        assert bool(result.isfinite().all())


def test_one_valid_token_is_defined() -> None:
    values, mask = torch.tensor([5.0, 7.0]), torch.tensor([False, True])
    assert whiten(values, mask, one_rank).tolist() == [0.0, 0.0]
    assert whiten(values, mask, one_rank, shift_mean=False).tolist() == [0.0, 7.0]
    assert whiten(values, mask & False, one_rank).tolist() == [0.0, 0.0]
    batch = replace(batch_of([1.0], ["a"]), values=torch.tensor([0.5]))
    assert functions.gae(batch).advantages.tolist() == [0.0]
    assert functions.reinforce_plus_plus(batch).advantages.tolist() == [0.0]


def test_advantages_are_bounded_where_leave_one_out_deviation_is_not() -> None:
    scores = [0.0] + [0.95] * 7
    for eps in (0.0, 1e-6, 1e-4):
        largest = functions.grpo(batch_of(scores, ["g"] * 8), eps=eps).advantages.abs().max()
        assert largest <= 7 / math.sqrt(8) * (1 + 1e-6)


@parametrized
def test_statistics_of_bf16_rewards_are_float64(
    estimator: Callable[[AdvantageBatch], Advantages],
) -> None:
    coarse = torch.tensor([0.1, 0.7, 0.3, 0.7, 0.95, 0.2, 0.6, 0.1], dtype=torch.bfloat16)
    groups = ["a"] * 4 + ["b"] * 4
    assert torch.equal(
        estimator(batch_of(coarse, groups)).advantages,
        estimator(batch_of(coarse.double(), groups)).advantages,
    )
    constant = torch.full((8,), 0.7, dtype=torch.bfloat16)
    assert not bool(estimator(batch_of(constant, ["a"] * 8)).advantages.any())
