"""The conformance suites fail for estimators and losses with the usual faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from posttune import _segments as segments
from posttune.testing.advantage_suite import AdvantageSuite
from posttune.testing.loss_suite import LossSuite
from posttune.types import AdvantageBatch, Advantages, LossBatch, LossTraits, TokenLoss, Traits
from torch import Tensor


def spread(per_sample: Tensor, batch: AdvantageBatch, kind: torch.dtype = torch.float32) -> Tensor:
    tokens = segments.spread(per_sample, batch.packed)
    return torch.where(batch.packed.mask, tokens, 0.0).to(kind)


def group_of_each(batch: AdvantageBatch) -> Tensor:
    names = batch.packed.group
    same = torch.tensor([[left == right for right in names] for left in names])
    return same.reshape(len(names), len(names)).double()


def good(batch: AdvantageBatch) -> Tensor:
    scored = ~batch.scores.isnan() & (segments.token_counts(batch.packed) > 0)
    same = group_of_each(batch) * scored
    scores = torch.where(scored, batch.scores, 0.0)
    mean = same @ scores / same.sum(1).clamp(min=1)
    return torch.where(scored, scores - mean, 0.0).round(decimals=9)


def poisoned(batch: AdvantageBatch) -> Tensor:
    same = group_of_each(batch)
    return batch.scores - same @ batch.scores / same.sum(1)


def counting_empty(batch: AdvantageBatch) -> Tensor:
    same = group_of_each(batch) * ~batch.scores.isnan()
    scores = batch.scores.nan_to_num(0.0)
    return torch.where(batch.scores.isnan(), 0.0, scores - same @ scores / same.sum(1).clamp(min=1))


def rounding(batch: AdvantageBatch) -> Tensor:
    """The fault of NUMERICS part 6: float32 statistics, and a tiny deviation that divides."""
    same = group_of_each(batch).float()
    scored = (~batch.scores.isnan() & (segments.token_counts(batch.packed) > 0)).float()
    same = same * scored
    scores = batch.scores.nan_to_num(0.0).float()
    count = same.sum(1).clamp(min=1)
    mean = same @ scores / count
    std = ((same * (scores[None] - mean[:, None]) ** 2).sum(1) / (count - 1).clamp(min=1)).sqrt()
    return (scores - mean) / (std + 1e-9) * scored


def whole_batch_on_one_rank(batch: AdvantageBatch) -> Tensor:
    scored = ~batch.scores.isnan() & (segments.token_counts(batch.packed) > 0)
    scores = torch.where(scored, batch.scores, 0.0)
    return torch.where(scored, scores - scores.sum() / scored.sum().clamp(min=1), 0.0)


class Estimator:
    def __init__(self, per_sample: Callable[[AdvantageBatch], Tensor], kind: torch.dtype) -> None:
        self.per_sample = per_sample
        self.kind = kind

    def advantage_estimator_traits(self) -> Traits:
        return Traits(needs_groups=True)

    def advantage_estimator_compute(self, batch: AdvantageBatch) -> Advantages:
        return Advantages(spread(self.per_sample(batch), batch, self.kind))


class Unmasked(Estimator):
    def advantage_estimator_compute(self, batch: AdvantageBatch) -> Advantages:
        return Advantages(segments.spread(self.per_sample(batch), batch.packed).float())


def failures(suite: Any) -> set[str]:
    """Names of the tests of a suite that fail."""
    failed = set()
    for name in dir(suite):
        if name.startswith("test_"):
            try:
                getattr(suite, name)()
            except AssertionError:
                failed.add(name)
    return failed


def suite_of(plugin: Any, kind: type[Any]) -> Any:
    suite = kind()
    suite.make = lambda: plugin
    return suite


@pytest.mark.parametrize(
    ("plugin", "expected"),
    [
        (Estimator(good, torch.float32), set()),
        (Estimator(good, torch.float64), {"test_returns_masked_float32"}),
        (Unmasked(good, torch.float32), {"test_returns_masked_float32"}),
        (Estimator(poisoned, torch.float32), {"test_unscorable_sample_counts_for_nothing"}),
        (Estimator(counting_empty, torch.float32), {"test_empty_response_counts_for_nothing"}),
        (Estimator(rounding, torch.float32), {"test_constant_group_gives_exactly_zero"}),
        (Estimator(whole_batch_on_one_rank, torch.float32), {"test_split_over_ranks"}),
    ],
    ids=["good", "float64", "unmasked", "NaN", "empty", "rounding", "ranks"],
)
def test_faults_of_estimators(plugin: Estimator, expected: set[str]) -> None:
    found = failures(suite_of(plugin, AdvantageSuite))
    assert expected <= found if expected else not found


def clean(batch: LossBatch) -> Tensor:
    return -torch.where(batch.packed.mask, batch.advantages, 0.0) * torch.where(
        batch.packed.mask, batch.logp, 0.0
    )


def by_product(batch: LossBatch) -> Tensor:
    return -(batch.advantages * batch.logp) * batch.packed.mask


def reduced(batch: LossBatch) -> Tensor:
    return clean(batch).mean()


def normalised(batch: LossBatch) -> Tensor:
    """Divides by what is in the micro-batch: the split then matters."""
    return clean(batch) / batch.packed.mask.sum().clamp(min=1)


def wrong_sign(batch: LossBatch) -> Tensor:
    return -clean(batch)


def overflowing(batch: LossBatch) -> Tensor:
    ratio = torch.where(batch.packed.mask, (batch.logp - batch.old_logp), 0.0).mul(2).exp()
    return -torch.where(batch.packed.mask, batch.advantages, 0.0) * ratio / 2


def regularised(batch: LossBatch) -> Tensor:
    return clean(batch) + torch.where(batch.packed.mask, batch.logp, 0.0).square()


class Loss:
    def __init__(self, tokens: Callable[[LossBatch], Tensor]) -> None:
        self.tokens = tokens

    def policy_loss_traits(self) -> LossTraits:
        return LossTraits()

    def policy_loss_compute(self, batch: LossBatch) -> TokenLoss:
        return TokenLoss(self.tokens(batch))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (clean, set()),
        (by_product, {"test_masked_tokens_have_no_gradient"}),
        (reduced, {"test_returns_one_value_a_token"}),
        (normalised, {"test_split_over_micro_batches"}),
        (wrong_sign, {"test_on_policy_gradient"}),
        (overflowing, {"test_extreme_ratios_are_finite"}),
        (regularised, {"test_no_advantage_no_gradient"}),
    ],
)
def test_faults_of_losses(tokens: Callable[[LossBatch], Tensor], expected: set[str]) -> None:
    found = failures(suite_of(Loss(tokens), LossSuite))
    assert expected <= found if expected else not found
