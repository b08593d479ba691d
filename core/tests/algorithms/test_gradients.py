"""Gradients against finite differences in float64, where a loss is smooth, and against formulas elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from posttune import _segments as segments
from posttune.loss import functions as losses
from posttune.loss.aggregate import MODES, aggregate, count
from posttune.loss.entropy import entropy
from posttune.loss.kl import kl_terms
from posttune.loss.value import value_loss
from posttune.testing._batches import packed, random_loss_batch
from posttune.types import LossBatch, TokenLoss
from torch import Tensor
from torch.autograd import gradcheck


def double_batch(seed: int = 0) -> LossBatch:
    batch = random_loss_batch(seed)
    return replace(
        batch,
        logp=batch.logp.double().requires_grad_(),
        old_logp=batch.old_logp.double(),
        advantages=batch.advantages.double(),
    )


def total(
    function: Callable[[LossBatch], TokenLoss], batch: LossBatch, mode: str
) -> Callable[[Tensor], Tensor]:
    def value(logp: Tensor) -> Tensor:
        loss = function(replace(batch, logp=logp)).loss
        return aggregate(loss, batch.packed, mode, count(batch.packed))

    return value


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "function",
    [
        losses.ppo_clip,
        lambda batch: losses.ppo_clip(batch, dual=1.5, high=0.28),
        losses.sapo,
        losses.gpg,
        losses.geo_mean,
    ],
    ids=["ppo_clip", "dual clip", "sapo", "gpg", "geo_mean"],
)
def test_finite_differences(function: Callable[[LossBatch], TokenLoss], mode: str) -> None:
    """Random points lie off the kinks of the clip, so that every one of these is smooth there."""
    batch = double_batch()
    assert gradcheck(total(function, batch, mode), (batch.logp,))


@pytest.mark.parametrize("high", [0.28, 1e-3])
def test_gspo_has_the_gradient_of_the_sequence_ratio(high: float) -> None:
    """The stopped gradient inside is GSPO-token's; summed over a sequence it is that of s itself."""
    batch = double_batch()
    layout, tokens = batch.packed, segments.token_counts(batch.packed)
    advantage = segments.masked_means(batch.advantages, layout)

    def plain(logp: Tensor) -> Tensor:
        ratio = segments.masked_means(logp - batch.old_logp, layout).exp()
        per_sequence = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - high, 1 + high))
        return per_sequence[tokens > 0].mean()

    def gspo(each: LossBatch) -> TokenLoss:
        return losses.ppo_clip(each, low=high, high=high, dual=None, level="sequence")

    assert gradcheck(plain, (batch.logp,))
    ours = total(gspo, batch, "seq_mean_token_mean")
    assert ours(batch.logp).item() == pytest.approx(plain(batch.logp).item())
    (expected,) = torch.autograd.grad(plain(batch.logp), batch.logp)
    (found,) = torch.autograd.grad(ours(batch.logp), batch.logp)
    torch.testing.assert_close(found, expected)


def gradient(function: Callable[[LossBatch], TokenLoss], batch: LossBatch) -> Tensor:
    (grad,) = torch.autograd.grad(function(batch).loss.sum(), batch.logp)
    return grad


def test_weighted_policy_gradients() -> None:
    """Losses with a stopped weight w: the gradient by log pi is exactly -w A."""
    batch = double_batch()
    mask, ratio = batch.packed.mask, (batch.logp - batch.old_logp).detach().exp()
    rise = batch.logp.detach().exp() - batch.old_logp.exp()
    inside = torch.where(batch.advantages > 0, rise <= 0.15, rise >= -0.15)
    log_weight = segments.spread(segments.masked_sums(ratio.log(), batch.packed), batch.packed)
    k, lam = (torch.where(batch.advantages >= 0, *pair) for pair in ((2.0, 3.0), (3.0, 2.0)))
    weights: dict[str, tuple[Callable[[LossBatch], TokenLoss], Tensor]] = {
        "cispo": (losses.cispo, ratio.clamp(0.8, 1.2)),
        "cispo absolute": (
            lambda each: losses.cispo(each, high=1.1, bounds="absolute"),
            ratio.clamp(max=1.1),
        ),
        "dppo_tv": (losses.dppo_tv, ratio * inside),
        "vespo": (losses.vespo, (k * log_weight + lam * (1 - log_weight.exp())).exp()),
    }
    for name, (function, weight) in weights.items():
        expected = torch.where(mask, -weight * batch.advantages, 0.0)
        torch.testing.assert_close(gradient(function, batch), expected, msg=name)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_dppo_kl_stops_only_what_leaves_the_region(advantage: float) -> None:
    """A rare token may grow a hundredfold; a common one may not halve, if that is where A pushes it."""
    old = torch.tensor([1e-5, 0.9, 0.5], dtype=torch.float64)
    new = torch.tensor([1e-3, 0.45, 0.99], dtype=torch.float64)
    logp = new.log().requires_grad_()
    layout = packed([3], ["a"])
    batch = LossBatch(layout, logp, old.log(), None, torch.full((3,), advantage, dtype=torch.float64))
    learns = gradient(losses.dppo_kl, batch) != 0
    assert learns.tolist() == ([True, True, False] if advantage > 0 else [True, False, True])


def test_clipped_tokens_have_no_gradient() -> None:
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    logp = (ratio.log() - 1).requires_grad_()
    batch = LossBatch(packed([4], ["a"]), logp, torch.full_like(ratio, -1.0), None, advantages)
    assert gradient(losses.ppo_clip, batch).tolist() == pytest.approx([0.0, -0.5, 1.5, 0.0])
    events = losses.ppo_clip(batch).metrics["clip_fraction"]
    assert [int(event) for event in events] == [2, 4]


@pytest.mark.parametrize("clamp", ["verl", "output", "none"])
@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs"])
def test_kl_finite_differences(name: str, clamp: str) -> None:
    logp = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64, requires_grad=True)
    ref_logp = torch.tensor([-1.5, -1.0, -0.4, -9.0], dtype=torch.float64)
    assert gradcheck(lambda each: kl_terms(each, ref_logp, name, clamp), (logp,))  # type: ignore[arg-type]


def test_value_loss_and_entropy_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    new, old, returns = torch.randn(3, 9, generator=generator, dtype=torch.float64)
    mask = torch.rand(9, generator=generator) > 0.2
    for clip in (None, 0.2):
        function = lambda each, clip=clip: value_loss(each, old, returns, mask, clip).loss  # noqa: E731
        assert gradcheck(function, (new.clone().requires_grad_(),))
    logits = torch.randn(3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    assert gradcheck(entropy, (logits,))
