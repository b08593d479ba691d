"""The optimiser step: decay, clipping, values that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from posttune.config.models import OptimizerConfig
from posttune.distributed.ranks import Ranks
from posttune.errors import ModelError
from posttune.trainer.optimizer import Stepper, make_optimizer
from torch import nn


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def stepper(model: nn.Module, **options: object) -> Stepper:
    config = OptimizerConfig.model_validate({"lr": 0.1, "grad_clip": 0.0, **options})
    return Stepper(make_optimizer(model, config), config.grad_clip, Ranks())


def fill(model: nn.Module, value: float) -> None:
    for param in model.parameters():
        param.grad = torch.full_like(param, value)


def test_vectors_are_not_decayed() -> None:
    model = layer()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    taken = stepper(model, weight_decay=0.5)
    fill(model, 0.0)
    taken.step(0.1, 1.0)
    assert torch.equal(model.bias, before["bias"])
    assert torch.allclose(model.weight, before["weight"] * (1 - 0.1 * 0.5))


def test_frozen_parameters_are_left_out() -> None:
    model = layer()
    model.bias.requires_grad_(False)
    assert [param.shape for param in stepper(model).params] == [model.weight.shape]


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ModelError, match="no parameter to train"):
        make_optimizer(layer().requires_grad_(False), OptimizerConfig())


def test_norm_is_reported_before_the_clip_and_the_gradient_clipped() -> None:
    model = layer()
    taken = stepper(model, grad_clip=1.0)
    seen: list[float] = []
    taken.optimizer.register_step_pre_hook(
        lambda *_: seen.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
    )
    fill(model, 2.0)
    assert taken.step(0.1, 1.0) == pytest.approx(2.0 * math.sqrt(8))
    assert seen == pytest.approx([1.0], rel=1e-5)


@pytest.mark.parametrize(("gradient", "loss"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan)])
def test_what_is_not_finite_moves_nothing_and_is_counted(gradient: float, loss: float) -> None:
    model = layer()
    before = model.weight.detach().clone()
    taken = stepper(model)
    for count in (1, 2):
        fill(model, gradient)
        taken.step(0.1, loss)
        assert taken.in_a_row == count
    assert torch.equal(model.weight, before)
    assert not taken.optimizer.state
    fill(model, 1.0)
    taken.step(0.1, 1.0)
    assert taken.in_a_row == 0
    assert not torch.equal(model.weight, before)


def test_a_missing_gradient_counts_as_zero() -> None:
    model = layer()
    taken = stepper(model)
    assert taken.step(0.1, 0.0) == 0.0
    assert len(taken.optimizer.state) == 2


def test_gradients_are_gone_after_the_step() -> None:
    model = layer()
    taken = stepper(model)
    fill(model, 1.0)
    taken.step(0.1, 1.0)
    assert model.weight.grad is None
