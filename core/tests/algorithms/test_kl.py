"""KL terms: values, clamps, the refusal of k1 as a loss; controllers and their state."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from posttune.errors import CheckpointError, ConfigError, UserError
from posttune.loss.controllers import AdaptiveKL, FixedKL, KLController
from posttune.loss.kl import check_loss_estimator, kl_terms
from posttune.loss.kl_names import canonical

D = torch.tensor([0.5, -1.0, 0.0, 3.0], dtype=torch.float64)
VALUES = {"k1": D, "k2": D.square() / 2, "k3": torch.exp(-D) + D - 1, "abs": D.abs()}


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"])
def test_value_and_gradient_of_every_name(name: str) -> None:
    logp = D.clone().requires_grad_()
    value = kl_terms(logp, torch.zeros_like(D), name, "none")
    (grad,) = torch.autograd.grad(value.sum(), logp)
    torch.testing.assert_close(value.detach(), VALUES[name.rstrip("+")])
    if name.endswith("+"):
        torch.testing.assert_close(grad, D)  # of k2


@pytest.mark.parametrize(
    ("clamp", "value", "slope"), [("verl", 10.0, 0.0), ("output", 10.0, 0.0), ("none", None, None)]
)
def test_clamps(clamp: str, value: float | None, slope: float | None) -> None:
    logp = torch.tensor([-30.0], dtype=torch.float64, requires_grad=True)
    term = kl_terms(logp, torch.tensor([-1.0], dtype=torch.float64), "k3", clamp)  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad(term.sum(), logp)
    assert term.item() == (value or pytest.approx(math.exp(29) - 30))
    assert grad.item() == (slope if slope is not None else pytest.approx(1 - math.exp(29)))


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs", "k3+"])
@pytest.mark.parametrize("garbage", [math.nan, -math.inf, -500.0])
def test_masked_tokens_have_neither_value_nor_gradient(name: str, garbage: float) -> None:
    mask = torch.tensor([True, False])
    logp = torch.tensor([-0.5, garbage], requires_grad=True)
    terms = kl_terms(logp, torch.tensor([-1.0, 7.0]), name, "none", mask)
    (grad,) = torch.autograd.grad(terms.sum(), logp)
    assert terms[1] == grad[1] == 0
    assert terms[0] == kl_terms(torch.tensor(-0.5), torch.tensor(-1.0), name, "none")
    assert bool(grad.isfinite().all())


def test_only_one_clamp_limits_every_estimator() -> None:
    far = torch.tensor([50.0])
    assert [kl_terms(far, 0 * far, "k1", clamp).item() for clamp in ("verl", "output", "none")] == [
        50,
        10,
        50,
    ]


@pytest.mark.parametrize(
    ("name", "ours"), [("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3"), ("low_var_kl+", "k3+")]
)
def test_other_names(name: str, ours: str) -> None:
    assert canonical(name) == ours


def test_unknown_estimator_names_the_known_ones() -> None:
    with pytest.raises(UserError, match="k3\\+"):
        kl_terms(D, D, "k4")


@pytest.mark.parametrize("name", ["k1", "kl"])
def test_k1_is_refused_as_a_loss_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match="gradient") as caught:
        check_loss_estimator(name, "stages.rl.kl.estimator")
    assert caught.value.problems[0].path == "stages.rl.kl.estimator"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["k1+", "k2", "k3", "abs", "k3+"])
def test_others_may_be_a_loss(name: str) -> None:
    check_loss_estimator(name)


@pytest.mark.parametrize("name", ["k2", "k3", "k1+", "k3+", "abs+"])
def test_one_step_on_the_kl_alone_lowers_it(name: str) -> None:
    """The sign: a categorical policy, sampled tokens, one gradient step (LESSONS 46)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, generator=generator).requires_grad_()
    ref = torch.log_softmax(torch.randn(8, generator=generator), 0)

    def exact() -> torch.Tensor:
        logp = torch.log_softmax(logits, 0)
        return (logp.exp() * (logp - ref)).sum()

    before = exact().item()
    tokens = torch.multinomial(torch.softmax(logits.detach(), 0), 4000, replacement=True, generator=generator)
    logp = torch.log_softmax(logits, 0)[tokens]
    kl_terms(logp, ref[tokens], name).mean().backward()
    assert logits.grad is not None
    with torch.no_grad():
        logits -= 0.1 * logits.grad
    assert exact().item() < before


def test_the_gradient_of_k1_is_that_of_log_pi() -> None:
    logp = D.clone().requires_grad_()
    (grad,) = torch.autograd.grad(kl_terms(logp, torch.zeros_like(D), "k1").sum(), logp)
    assert grad.tolist() == [1.0] * 4


# --- controllers -----------------------------------------------------------------------------


def test_adaptive_controller_follows_the_measured_kl() -> None:
    """NUMERICS part 5; the samples of a step count, not the steps."""
    controller = AdaptiveKL(0.2, target=0.1, horizon=10_000)
    expected = [0.198976, 0.198976, 0.19999475712]
    for kl, coef in zip([0.05, 0.1, 0.5], expected, strict=True):
        controller.update(kl=kl, n=256)
        assert controller.coef == pytest.approx(coef, abs=1e-12)


def test_the_trainer_never_moves_a_fixed_coefficient() -> None:
    controller = FixedKL(0.01)
    controller.update(kl=5.0, n=256)
    assert controller.coef == 0.01


def test_a_call_by_hand_moves_a_fixed_coefficient_once() -> None:
    """As in the seed script: target 0.03, horizon 10,000; the step is only logged."""
    controller = FixedKL(0.01, samples=8)
    controller.update(kl=0.05, step=3)
    assert controller.coef == pytest.approx(0.01 * (1 + 0.2 * 8 / 10_000))
    controller.update(kl=0.0, step=4000)
    assert controller.coef == pytest.approx(0.01 * (1 + 0.2 * 8 / 10_000) * (1 - 0.2 * 8 / 10_000))


def test_a_call_by_hand_on_an_adaptive_controller_warns() -> None:
    controller = AdaptiveKL(0.01, samples=8)
    with pytest.warns(UserWarning, match="by itself"):
        controller.update(kl=0.05, step=3)
    assert controller.coef > 0.01


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_a_kl_that_is_not_finite_moves_nothing(kl: float, caplog: pytest.LogCaptureFixture) -> None:
    controller = AdaptiveKL(0.2)
    with caplog.at_level(logging.WARNING):
        controller.update(kl=kl, n=10)
    assert controller.coef == 0.2
    assert "leaves the coefficient" in caplog.text


def test_state_survives() -> None:
    first = AdaptiveKL(0.2)
    first.update(kl=1.0, n=100)
    second = AdaptiveKL(0.2)
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(kl=0.001, n=50)
    assert first.coef == second.coef


@pytest.mark.parametrize("state", [{}, {"adaptive": False, "coef": 0.1}, {"adaptive": True, "coef": "0.1"}])
def test_state_of_another_controller_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(CheckpointError):
        AdaptiveKL(0.2).load_state_dict(state)


@pytest.mark.parametrize(
    "options", [{"coef": -1}, {"coef": math.nan}, {"target": 0}, {"horizon": -5}, {"samples": 0}]
)
def test_bad_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UserError):
        KLController(**({"coef": 0.1} | options))  # type: ignore[arg-type]
