"""Every optimiser that can be named: it trains, waits on the host, and resumes bit for bit."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_toy as toy
from optimizer_libraries import need
from posttune.config.models import OptimizerConfig
from posttune.distributed.ranks import Ranks
from posttune.errors import Interrupted, UserError
from posttune.optim.make import make_optimizer
from posttune.optim.states import plain_state, state_bytes
from posttune.optim.stepping import materialise
from posttune.run.stages import InterruptFlag
from posttune.trainer.optimizer import Stepper, make_stepper
from pydantic import ValidationError
from torch import nn

pytestmark = pytest.mark.slow

NAMES = [
    "adamw",
    "adafactor",
    "torchao_adamw",
    "torchao_adamw_8bit",
    "torchao_adamw_4bit",
    "bnb_adamw_8bit",
]


def layers(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 128)).to(dtype)


def trained(
    config: OptimizerConfig, steps: int = 4, dtype: torch.dtype = torch.float32
) -> tuple[Any, Stepper]:
    """A model after some steps."""
    model = layers(dtype)
    stepper = make_stepper(model, config, Ranks())
    torch.manual_seed(1)
    inputs = torch.randn(16, 128, dtype=dtype)
    for _ in range(steps):
        stepper.begin(config.lr)
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        stepper.step(config.lr, float(loss.detach()))
    return model, stepper


def equal(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_falls(name: str) -> None:
    need(name)
    config = OptimizerConfig.model_validate({"name": name, "lr": 0.01})
    before = layers()
    after, _ = trained(config, steps=12)
    torch.manual_seed(1)
    inputs = torch.randn(16, 128)
    losses = [float((model(inputs) - inputs).square().mean().detach()) for model in (before, after)]
    assert losses[1] < 0.95 * losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_moments_that_wait_on_the_host_change_nothing(name: str) -> None:
    need(name)
    config = OptimizerConfig.model_validate({"name": name, "lr": 0.01})
    there, first = trained(config)
    away, second = trained(config.model_copy(update={"offload": True}))
    assert equal(there, away)
    assert state_bytes(first.optimizer) == state_bytes(second.optimizer)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_in_the_backward_pass_is_the_same_step(name: str) -> None:
    need(name)
    config = OptimizerConfig.model_validate({"name": name, "lr": 0.01, "grad_clip": 0})
    after, _ = trained(config)
    within, stepper = trained(config.model_copy(update={"in_backward": True}))
    assert equal(after, within)
    assert all(param.grad is None for param in within.parameters())
    assert stepper.in_a_row == 0


def test_a_step_in_the_backward_pass_tells_the_norm_of_the_gradient() -> None:
    norms = []
    for within in (False, True):
        model = layers()
        config = OptimizerConfig.model_validate({"lr": 0.1, "grad_clip": 0, "in_backward": within})
        stepper = make_stepper(model, config, Ranks())
        stepper.begin(0.1)
        loss = model(torch.ones(2, 128)).square().sum()
        loss.backward()
        norms.append(stepper.step(0.1, float(loss)))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_second_micro_batch_is_refused_in_the_backward_pass() -> None:
    model = layers()
    config = OptimizerConfig.model_validate({"lr": 0.1, "grad_clip": 0, "in_backward": True})
    stepper = make_stepper(model, config, Ranks())
    stepper.begin(0.1)
    model(torch.ones(2, 128)).sum().backward()
    with pytest.raises(UserError, match=r"second micro-batch.*\n.*micro_batch_tokens"):
        model(torch.ones(2, 128)).sum().backward()


def test_a_gradient_that_is_not_finite_moves_nothing_in_the_backward_pass() -> None:
    model = layers()
    before = [param.clone() for param in model.parameters()]
    config = OptimizerConfig.model_validate({"lr": 0.1, "grad_clip": 0, "in_backward": True})
    stepper = make_stepper(model, config, Ranks())
    stepper.begin(0.1)
    (model(torch.ones(2, 128)).sum() * float("nan")).backward()
    stepper.step(0.1, float("nan"))
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert stepper.in_a_row == 1


def test_clipping_and_a_step_in_the_backward_pass_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match="before the norm of the whole gradient is known"):
        OptimizerConfig.model_validate({"in_backward": True})


def test_several_processes_and_a_step_in_the_backward_pass_exclude_each_other() -> None:
    config = OptimizerConfig.model_validate({"grad_clip": 0, "in_backward": True})
    with pytest.raises(UserError, match="whole only when all 2 processes"):
        make_stepper(layers(), config, Ranks(world=2))


def test_rounding_by_chance_is_for_torchao_and_bfloat16() -> None:
    with pytest.raises(ValidationError, match="stochastic_rounding is torchao's"):
        OptimizerConfig.model_validate({"stochastic_rounding": True})
    config = OptimizerConfig.model_validate({"name": "torchao_adamw", "stochastic_rounding": True})
    with pytest.raises(UserError, match="float32: nothing is rounded"):
        make_optimizer(layers(), config)


def test_small_updates_count_on_average_when_rounded_by_chance() -> None:
    """An update of a hundredth of a weight's last bit: rounded to nearest it is always lost."""
    need("torchao")
    means = {}
    for rounding in (False, True):
        model = nn.Linear(256, 64, bias=False).to(torch.bfloat16)
        nn.init.constant_(model.weight, 1.0)
        config = OptimizerConfig.model_validate(
            {"name": "torchao_adamw_8bit", "lr": 4e-5, "stochastic_rounding": rounding}
        )
        stepper = make_stepper(model, config, Ranks())
        torch.manual_seed(0)
        for _ in range(20):
            model.weight.grad = torch.ones_like(model.weight)
            stepper.step(4e-5, 0.0)
        means[rounding] = float(model.weight.detach().double().mean())
    assert means[False] == 1.0
    assert means[True] == pytest.approx(1 - 20 * 4e-5, abs=2e-4)


def test_eight_bits_and_rounding_by_chance_lose_nothing_beside_float32() -> None:
    """The loss after 60 steps is that of float32 AdamW; with plain rounding the weights stand still."""
    need("torchao")
    chosen: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
        "float32": (torch.float32, {"name": "adamw"}),
        "8 bits": (torch.bfloat16, {"name": "torchao_adamw_8bit", "stochastic_rounding": True}),
        "plain": (torch.bfloat16, {"name": "torchao_adamw_8bit"}),
    }
    torch.manual_seed(1)
    inputs = torch.randn(16, 128)
    losses = {"before": float((layers()(inputs) - inputs).square().mean().detach())}
    for label, (dtype, fields) in chosen.items():
        config = OptimizerConfig.model_validate({**fields, "lr": 1e-4, "betas": [0.9, 0.95]})
        model, _ = trained(config, steps=60, dtype=dtype)
        losses[label] = float((model.float()(inputs) - inputs).square().mean().detach())
    fall = losses["before"] - losses["float32"]
    assert abs(losses["8 bits"] - losses["float32"]) < 0.05 * fall
    assert abs(losses["plain"] - losses["float32"]) > 2 * abs(losses["8 bits"] - losses["float32"])


@pytest.mark.parametrize(
    ("name", "library"), [("torchao_adamw_8bit", "torchao"), ("bnb_adamw_8bit", "bitsandbytes")]
)
def test_a_library_that_is_missing_is_named(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = importlib.import_module

    def without(module: str, package: str | None = None) -> Any:
        if module.startswith(library):
            raise ModuleNotFoundError(f"No module named {module!r}")
        return plain(module, package)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(UserError, match=rf"optimizer.name: {name}.*\n.*posttune\[{library}\]"):
        make_optimizer(layers(), OptimizerConfig.model_validate({"name": name}))


@pytest.mark.parametrize("name", ["torchao_adamw", "torchao_adamw_8bit", "torchao_adamw_4bit"])
def test_making_the_state_leaves_the_weights_alone(name: str) -> None:
    need(name)
    model = layers(torch.bfloat16)
    before = [param.clone() for param in model.parameters()]
    optimizer = make_optimizer(
        model,
        OptimizerConfig.model_validate({"name": name, "weight_decay": 0.1, "stochastic_rounding": True}),
    )
    materialise(optimizer)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert len(optimizer.state) == len(before)
    assert all(float(group["lr"]) == pytest.approx(1e-5) for group in optimizer.param_groups)


def test_moments_take_the_bytes_that_are_promised() -> None:
    weights = sum(param.numel() for param in layers().parameters())
    for name, bytes_each in (("adamw", 8.0), ("torchao_adamw_8bit", 2.0), ("bnb_adamw_8bit", 2.0)):
        need(name)
        _, stepper = trained(OptimizerConfig.model_validate({"name": name}), steps=1)
        assert state_bytes(stepper.optimizer) / weights == pytest.approx(bytes_each, rel=0.25)
    assert not plain_state({"step": 3})


RESUMED: dict[str, dict[str, Any]] = {
    "adamw on the host": {"offload": True},
    "adafactor": {"name": "adafactor"},
    "in the backward pass": {"in_backward": True, "grad_clip": 0},
    "torchao": {"name": "torchao_adamw", "stochastic_rounding": True},
    "torchao, 8 bits": {"name": "torchao_adamw_8bit", "stochastic_rounding": True},
    "torchao, 4 bits, on the host": {"name": "torchao_adamw_4bit", "offload": True},
    "bitsandbytes": {"name": "bnb_adamw_8bit"},
}


@pytest.fixture(scope="module")
def wide_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that are large enough for moments of 8 bits."""
    folder = tmp_path_factory.mktemp("wide")
    toy.make_task(folder, hidden=64, layers=1)
    return folder


@pytest.mark.parametrize("which", RESUMED)
def test_a_run_resumes_bit_for_bit(wide_task: Path, tmp_path: Path, which: str) -> None:
    optimizer = RESUMED[which]
    need(optimizer.get("name", "adamw"))
    dtype = "bfloat16" if optimizer.get("stochastic_rounding") else "float32"
    model = {"path": str(wide_task / "model"), "dtype": dtype}
    stage = toy.sft(wide_task, steps=4, optimizer=optimizer) | {"model": model}
    toy.run_stage(tmp_path / "whole", stage)
    flag = InterruptFlag()
    flag.set()
    with pytest.raises(Interrupted, match="after step 1 of 4"):
        toy.run_stage(tmp_path / "parts", stage, interrupt=flag)
    toy.run_stage(tmp_path / "parts", stage, resume=True)
    toy.assert_same_run(tmp_path / "whole", tmp_path / "parts", 4)


def test_another_optimiser_is_refused_on_resume(wide_task: Path, tmp_path: Path) -> None:
    flag = InterruptFlag()
    flag.set()
    with pytest.raises(Interrupted):
        toy.run_stage(tmp_path, toy.sft(wide_task, steps=4), interrupt=flag)
    other = toy.sft(wide_task, steps=4, optimizer={"name": "adafactor"})
    with pytest.raises(Exception, match=r"optimizer.name"):
        toy.run_stage(tmp_path, other, resume=True)
