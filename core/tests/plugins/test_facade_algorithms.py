"""Estimators and losses through their facades: shapes, types, masks and gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from posttune import hookimpl
from posttune.errors import PluginCallError, PluginReturnError, RunError
from posttune.facade import Estimator, PolicyLoss
from posttune.pipeline import bind
from posttune.types import AdvantageBatch, Advantages, LossBatch, LossTraits, Packed, TokenLoss, Traits

PACKED = Packed(
    cu_seqlens=torch.tensor([0, 2, 5], dtype=torch.int32),
    mask=torch.tensor([True, True, True, False, True]),
    group=("g", "g"),
)
GOOD = torch.tensor([0.5, 0.5, -1.0, 0.0, -1.0])


def batch(**changes: Any) -> AdvantageBatch:
    return replace(
        AdvantageBatch(
            packed=PACKED,
            token_rewards=torch.zeros(5, dtype=torch.float64),
            scores=torch.tensor([1.0, 0.0], dtype=torch.float64),
            dims={},
            values=None,
            baselines=None,
            reduce=lambda tensor: tensor,
        ),
        **changes,
    )


class Estimates:
    def __init__(self, result: Any, traits: Any = None) -> None:
        self.result = result
        self.traits = traits or Traits()

    @hookimpl
    def advantage_estimator_traits(self) -> Any:
        return self.traits

    @hookimpl
    def advantage_estimator_compute(self, batch: AdvantageBatch) -> Any:
        return self.result


def estimate(result: Any, traits: Traits | None = None, **changes: Any) -> Advantages:
    facade = Estimator(bind("advantage_estimator", Estimates(result, traits), "test"))
    return facade.compute(batch(**changes))


def test_good_advantages_pass() -> None:
    assert torch.equal(estimate(Advantages(GOOD, metrics={"std": 1.0})).advantages, GOOD)
    assert torch.equal(estimate(Advantages(torch.zeros(5), returns=GOOD)).returns, GOOD)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "NoneType None, not Advantages"),
        (GOOD, "not Advantages"),
        (Advantages([0.0] * 5), "advantages with list [0.0, 0.0, 0.0, 0.0, 0.0] in place of a tensor"),
        (Advantages(GOOD[:4]), "advantages with shape [4] in place of [5]"),
        (Advantages(GOOD.double()), "advantages with torch.float64 in place of torch.float32"),
        (Advantages(GOOD.to("meta")), "advantages with device meta in place of cpu"),
        (Advantages(torch.where(GOOD > 0, math.nan, GOOD)), "advantages with values that are not finite"),
        (Advantages(torch.ones(5)), "that are not 0 where the mask is False or the sample unscorable"),
        (Advantages(torch.tensor([0, 0, 0, math.nan, 0])), "not 0 where the mask is False"),
        (Advantages(GOOD, returns=GOOD[:1]), "returns with shape [1] in place of [5]"),
        (Advantages(GOOD, metrics={"std": "wide"}), "str 'wide' as metric 'std'"),
    ],
)
def test_bad_advantages_are_refused(result: Any, words: str) -> None:
    with pytest.raises(PluginReturnError) as caught:
        estimate(result)
    assert str(caught.value).startswith("advantage_estimator 'test': advantage_estimator_compute returned ")
    assert words in str(caught.value)


def test_an_unscorable_sample_must_have_no_advantage() -> None:
    scores = torch.tensor([1.0, math.nan], dtype=torch.float64)
    with pytest.raises(PluginReturnError, match="sample unscorable"):
        estimate(Advantages(GOOD), scores=scores)
    alone = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0])
    assert estimate(Advantages(alone), scores=scores).advantages is alone


def test_a_critic_s_estimator_has_inputs_and_outputs_of_its_own() -> None:
    traits = Traits(needs_critic=True)
    with pytest.raises(RunError, match="it needs the values of a critic"):
        estimate(Advantages(GOOD, returns=GOOD), traits)
    with pytest.raises(PluginReturnError, match="no returns, which its critic must learn"):
        estimate(Advantages(GOOD), traits, values=torch.zeros(5))
    assert estimate(Advantages(GOOD, returns=GOOD), traits, values=torch.zeros(5)).returns is GOOD
    with pytest.raises(RunError, match="the scores of greedy answers"):
        estimate(Advantages(GOOD), Traits(needs_greedy_baseline=True))


def test_traits_are_read_once_and_checked() -> None:
    assert Estimator(bind("advantage_estimator", Estimates(None), "test")).traits == Traits()
    with pytest.raises(PluginReturnError, match="not Traits"):
        Estimator(bind("advantage_estimator", Estimates(None, {"needs_critic": True}), "test"))


class Loses:
    def __init__(self, compute: Any, traits: Any = None) -> None:
        self.compute = compute
        self.traits = traits or LossTraits()

    @hookimpl
    def policy_loss_traits(self) -> Any:
        return self.traits

    @hookimpl
    def policy_loss_compute(self, batch: LossBatch) -> Any:
        return self.compute(batch)


def loss(compute: Any, *, grad: bool = True) -> TokenLoss:
    logp = torch.full((5,), -0.5, requires_grad=grad)
    given = LossBatch(PACKED, logp, torch.full((5,), -0.5), None, GOOD)
    return PolicyLoss(bind("policy_loss", Loses(compute), "test")).compute(given)


def one() -> torch.Tensor:
    return torch.tensor(1.0)


def test_a_good_loss_keeps_its_gradient_and_its_metrics_lose_theirs() -> None:
    result = loss(lambda b: TokenLoss(-b.advantages * b.logp, {"clip": (b.logp.sum(), one())}))
    assert result.loss.requires_grad
    total, count = result.metrics["clip"]
    assert (total.item(), count.item()) == (-2.5, 1.0)
    assert not total.requires_grad


def test_a_loss_that_is_not_finite_is_left_to_the_trainer() -> None:
    assert loss(lambda b: TokenLoss(b.logp * math.nan)).loss.isnan().all()


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (lambda b: None, "NoneType None, not TokenLoss"),
        (lambda b: b.logp, "not TokenLoss"),
        (lambda b: TokenLoss(b.logp.mean()), "a loss with shape [] in place of [5]"),
        (lambda b: TokenLoss(b.logp.double()), "a loss with torch.float64 in place of torch.float32"),
        (lambda b: TokenLoss(b.logp.detach()), "a loss without a gradient"),
        (lambda b: TokenLoss(b.logp, {"x": b.logp}), "metric 'x' that is not a pair of tensors (sum, count)"),
        (lambda b: TokenLoss(b.logp, {"x": (1.0, 2.0)}), "metric 'x' that is not a pair"),
        (lambda b: TokenLoss(b.logp, {"x": (b.logp, one())}), "metric 'x' that is not a pair"),
        (lambda b: TokenLoss(b.logp, [1]), "list [1] as metrics, not a dict"),
    ],
)
def test_bad_losses_are_refused(compute: Any, words: str) -> None:
    with pytest.raises(PluginReturnError) as caught:
        loss(compute)
    assert str(caught.value).startswith("policy_loss 'test': policy_loss_compute returned ")
    assert words in str(caught.value)


def test_without_a_gradient_none_is_asked_for() -> None:
    assert not loss(lambda b: TokenLoss(b.logp * 2), grad=False).loss.requires_grad


def test_a_loss_that_raises_keeps_its_cause() -> None:
    with pytest.raises(PluginCallError, match="policy_loss_compute raised RuntimeError") as caught:
        loss(lambda b: TokenLoss(b.logp @ torch.ones(3)))
    assert isinstance(caught.value.__cause__, RuntimeError)
