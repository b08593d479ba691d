"""Where models, moments and activations wait changes nothing that is computed."""

from __future__ import annotations

import dataclasses
import gc
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_toy as toy
from posttune.config.models import MemoryConfig
from posttune.errors import ConfigError, Interrupted, UserError
from posttune.memory import residence
from posttune.memory.activations import kept_on_host
from posttune.memory.apply import apply_memory
from posttune.memory.residence import lodge, resident
from posttune.run.stages import InterruptFlag
from posttune.trainer import _inputs
from posttune.trainer import rl as rl_module
from posttune.trainer.checks import check_stage
from pydantic import ValidationError
from torch import nn

pytestmark = pytest.mark.slow

PPO = {
    "advantage": {"name": "gae"},
    "kl": {"where": "reward", "estimator": "k1", "coef": 0.1},
    "critic": {"optimizer": {"lr": 1e-3}},
    "batch": {"mini_batches": 2},
    "optimizer": {"lr": 1e-3},
}


def ppo(task: Path, **fields: Any) -> dict[str, Any]:
    return toy.rl(task, **toy.merged(PPO, {"model": str(task / "model"), **fields}))


@pytest.fixture
def own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has weights of its own, as vLLM has."""
    plain: Any = vars(rl_module)["rollout_context"]

    def alone(*arguments: Any) -> Any:
        return dataclasses.replace(plain(*arguments), live_model=None)

    monkeypatch.setattr(rl_module, "rollout_context", alone)


EVERYTHING = ["policy", "critic", "reference", "optimizer"]
OPTIONS: dict[str, dict[str, Any]] = {
    "all models and moments wait": {"memory": {"offload": EVERYTHING}},
    "moments of one weight at a time": {
        "memory": {"offload": ["policy", "critic", "reference"]},
        "optimizer": {"offload": True},
        "critic": {"optimizer": {"offload": True}},
    },
    "activations wait": {"memory": {"activations": "host"}},
}


@pytest.mark.parametrize("which", OPTIONS)
@pytest.mark.usefixtures("own_weights")
def test_a_run_is_the_same_bit_for_bit(
    task: Path, tmp_path: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttune.memory.activations._SMALL", 0)
    toy.run_stage(tmp_path / "plain", ppo(task, steps=2))
    toy.run_stage(tmp_path / "away", ppo(task, steps=2, **OPTIONS[which]))
    first, second = (toy.metrics(tmp_path / each) for each in ("plain", "away"))
    assert [toy.comparable(line) for line in first] == [toy.comparable(line) for line in second]
    one, other = (tmp_path / each / "models" / "rl" for each in ("plain", "away"))
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


@pytest.mark.usefixtures("own_weights")
def test_a_run_whose_models_wait_resumes_bit_for_bit(task: Path, tmp_path: Path) -> None:
    stage = ppo(task, steps=3, memory={"offload": EVERYTHING})
    toy.run_stage(tmp_path / "whole", stage)
    flag = InterruptFlag()
    flag.set()
    with pytest.raises(Interrupted):
        toy.run_stage(tmp_path / "parts", stage, interrupt=flag)
    toy.run_stage(tmp_path / "parts", stage, resume=True)
    toy.assert_same_run(tmp_path / "whole", tmp_path / "parts", 3)


@pytest.mark.usefixtures("own_weights")
def test_what_waits_is_counted_and_away_between_phases(task: Path, tmp_path: Path) -> None:
    gc.collect()  # models of other tests
    with ExitStack() as stack:
        setup = toy.prepared(tmp_path, ppo(task, memory={"offload": EVERYTHING}), stack)
        (found,) = toy.take_steps(setup, 1)
        lodger = residence._LODGERS[setup.loaded.model]
        assert all(param.data_ptr() == home.data_ptr() for param, home in lodger._homes)
    weights = sum(param.nbytes for param in setup.loaded.model.parameters()) / 2**20
    assert found["memory/weights_mb"] == pytest.approx(3 * weights, rel=0.15)  # policy, critic, reference
    assert found["memory/optimizer_mb"] == pytest.approx(4 * weights, rel=0.15)  # a critic has no words
    assert found["memory/offloaded_mb"] == pytest.approx(7 * weights, rel=0.15)
    assert found["memory/gradients_mb"] == pytest.approx(weights, rel=0.1)


@pytest.mark.usefixtures("own_weights")
@pytest.mark.parametrize("waiting", [[], ["policy"], ["critic", "reference"]])
def test_what_is_to_wait_is_never_moved_to_the_device_while_it_is_loaded(
    task: Path, tmp_path: Path, waiting: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU it would lie there, or in the allocator's cache, beside the engine that starts next."""
    placed: list[int] = []
    plain = _inputs.place

    def counted(model: Any, *arguments: Any) -> Any:
        placed.append(id(model))
        return plain(model, *arguments)

    monkeypatch.setattr(_inputs, "place", counted)
    with ExitStack() as stack:
        setup = toy.prepared(tmp_path, ppo(task, memory={"offload": waiting}), stack)
        work: Any = setup.work
        models = {
            "policy": work.loaded.model,
            "critic": work.critic.loaded.model,
            "reference": work.reference.model,
        }
        assert {name for name, model in models.items() if id(model) in placed} == {*models} - {*waiting}


def test_a_lodger_comes_and_goes_with_its_changes() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].weight.requires_grad_(False)
    lodge(model, torch.device("cpu"))
    home = model[0].weight.data_ptr()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0)
    with resident(model):
        assert model[0].weight.data_ptr() != home
        with torch.no_grad():
            model[0].weight.fill_(7.0)  # a visit that changes nothing gives its copy up
    assert not (model[0].weight == 7.0).any()
    with resident(model, optimizer), resident(model), torch.no_grad():
        model[0].weight.fill_(7.0)
    assert model[0].weight.data_ptr() == home
    assert (model[0].weight == 7.0).all()


def test_an_error_leaves_the_lodger_at_home() -> None:
    model = nn.Linear(3, 3)
    lodge(model, torch.device("cpu"))
    home = model.weight.data_ptr()
    with pytest.raises(ZeroDivisionError), resident(model):
        raise ZeroDivisionError
    assert model.weight.data_ptr() == home


def test_an_engine_that_computes_with_the_policys_weights_keeps_them(task: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"never idle: the rollout backend hf"):
        toy.run_stage(tmp_path, ppo(task, memory={"offload": ["policy"]}))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no critic": (
        {"critic": None, "advantage": {"name": "grpo"}, "memory": {"offload": ["critic"]}},
        "no critic",
    ),
    "no reference": ({"kl": {"where": "none"}, "memory": {"offload": ["reference"]}}, "no reference"),
    "twice": (
        {
            "memory": {"offload": ["optimizer"]},
            "optimizer": {"offload": True},
            "critic": {"optimizer": {"offload": True}},
        },
        "already",
    ),
}


@pytest.mark.parametrize("which", REFUSED)
def test_what_is_not_there_cannot_wait(task: Path, tmp_path: Path, which: str) -> None:
    fields, text = REFUSED[which]
    stage = toy.context(tmp_path, {"rl": ppo(task, **fields)}, "rl").run.stages["rl"]
    with pytest.raises(ConfigError, match=text):
        check_stage("rl", stage)  # type: ignore[arg-type]


def test_models_of_sft_are_never_idle(task: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"never idle; optimizer.offload"):
        toy.run_stage(tmp_path, toy.sft(task, memory={"offload": ["policy"]}))


def test_nothing_waits_twice() -> None:
    with pytest.raises(ValidationError, match="twice"):
        MemoryConfig.model_validate({"offload": ["critic", "critic"]})


def test_activations_do_not_wait_where_weights_are_cut() -> None:
    config = MemoryConfig(activations="host")
    with pytest.raises(UserError, match=r"memory\.activations.*weights that are cut"):
        apply_memory(nn.Linear(2, 2), config, cut=True)
    apply_memory(nn.Linear(2, 2), config)


def test_activations_wait_and_weights_do_not() -> None:
    model = nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 512))
    inputs = torch.randn(640, 512)
    moved: list[int] = []
    plain = torch.empty

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        made = plain(*arguments, **options)
        moved.append(made.nbytes)
        return made

    model(inputs).sum().backward()
    wanted = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    model.zero_grad()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", counted)
        with kept_on_host(model):
            out = model(inputs).sum()
    assert moved
    assert 512 * 1024 * 4 not in moved  # no weight
    out.backward()
    got = [param.grad for param in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True) if other is not None)
