"""What a checkpoint keeps of a model and its optimiser, by the names of the parameters.

Tensors are named ``model/<parameter>``, ``optimizer/<parameter>/<quantity>`` and ``rng/<rank>/<generator>``.
What is no tensor (an optimiser's settings) is plain data for a JSON file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from posttune.distributed.tensors import settle
from posttune.errors import CheckpointError
from posttune.models.heads import HEAD
from posttune.optim.states import plain_state
from posttune.optim.stepping import keeps_wrapped, materialise

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
_ADAPTER = ".lora_"
_MODEL = "model/"
_IMPLEMENTATION = {"fused", "foreach", "capturable", "differentiable"}


def model_tensors(model: nn.Module, *, adapters_only: bool) -> dict[str, torch.Tensor]:
    """Parameters and buffers, tied ones once; the module's own storage, not copies."""
    settle(model)
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen or (adapters_only and not _trained_with_adapters(name)):
            continue
        seen.add(id(tensor))
        found[_MODEL + name] = tensor.detach()
    return found


def _trained_with_adapters(name: str) -> bool:
    """Adapters, and the scalar head of a reward model or critic."""
    return _ADAPTER in name or f".{HEAD}." in f".{name}"


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """The tensors that the optimiser keeps of each parameter (moments, step counts)."""
    names = _names(model)
    return {
        f"optimizer/{_name(names, parameter)}/{quantity}": value
        for parameter, state in optimizer.state.items()
        for quantity, value in plain_state(state).items()
    }


def optimizer_settings(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimiser's groups, by parameter names, and what it keeps that is no tensor."""
    names = _names(model)
    groups = [
        {key: _plain(value) for key, value in group.items() if key != "params"}
        | {"params": [_name(names, parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    numbers = {
        _name(names, parameter): {
            quantity: value for quantity, value in state.items() if not isinstance(value, torch.Tensor)
        }
        for parameter, state in optimizer.state.items()
    }
    return {"class": type(optimizer).__name__, "groups": groups, "numbers": numbers}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _name(names: Mapping[int, str], parameter: torch.Tensor) -> str:
    if id(parameter) not in names:
        raise CheckpointError(
            f"the optimiser holds a parameter of shape {tuple(parameter.shape)} that is not the model's",
            who="checkpoint",
            fix="make the optimiser from the parameters of the model that is saved",
        )
    return names[id(parameter)]


def check_model(who: str, wanted: Mapping[str, torch.Tensor], stored: Shapes, *, types: bool) -> None:
    """Raise `CheckpointError` naming what differs between the model and what is stored of one."""
    have = {name.removeprefix(_MODEL): entry for name, entry in stored.items() if name.startswith(_MODEL)}
    wanted = {name.removeprefix(_MODEL): tensor for name, tensor in wanted.items()}
    problems = [
        *_difference("the model has {} tensors that the checkpoint has not, the first is {}", wanted, have),
        *_difference("the checkpoint has {} tensors that the model has not, the first is {}", have, wanted),
    ]
    for name, tensor in wanted.items():
        shape, dtype = have.get(name, (tuple(tensor.shape), tensor.dtype))
        if shape != tuple(tensor.shape):
            problems.append(f"{name} is {list(shape)} in the checkpoint, {list(tensor.shape)} in the model")
        elif types and dtype != tensor.dtype:
            problems.append(f"{name} is {dtype} in the checkpoint, {tensor.dtype} in the model")
    _refuse(who, problems, "it is of another model; resume with the model that was trained")


def _difference(text: str, left: Iterable[str], right: Iterable[str]) -> list[str]:
    names = sorted(set(left) - set(right))
    return [text.format(len(names), names[0])] if names else []


def _refuse(who: str, problems: list[str], fix: str) -> None:
    if problems:
        more = f" (and {len(problems) - 3} more differences)" if len(problems) > 3 else ""
        raise CheckpointError("; ".join(problems[:3]) + more, who=who, fix=fix)


def check_optimizer(who: str, model: nn.Module, optimizer: Optimizer, settings: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` where the optimiser's class or groups are not those that were saved."""
    problems: list[str] = []
    if settings["class"] != type(optimizer).__name__:
        problems.append(f"it is of {settings['class']}, the optimiser is {type(optimizer).__name__}")
    now = [group["params"] for group in optimizer_settings(model, optimizer)["groups"]]
    then = [group["params"] for group in settings["groups"]]
    if len(now) != len(then):
        problems.append(f"it has {len(then)} parameter groups, the optimiser {len(now)}")
    for place, (current, saved) in enumerate(zip(now, then, strict=False)):
        problems += _difference(
            f"group {place}: {{}} parameters are not in the checkpoint, the first is {{}}", current, saved
        )
        problems += _difference(
            f"group {place}: {{}} parameters are not the optimiser's, the first is {{}}", saved, current
        )
    _refuse(who, problems, "resume with the optimiser and the model that were trained")


def empty_optimizer_tensors(
    model: nn.Module, optimizer: Optimizer, stored: Shapes
) -> dict[str, torch.Tensor]:
    """Tensors to read the optimiser's state into, on the device of each parameter.

    Step counts are on the CPU unless the optimiser is fused or capturable, as torch itself has it.
    """
    if keeps_wrapped(optimizer):
        return _own_tensors(model, optimizer, stored)
    parameters = dict(model.named_parameters())
    counts_beside = {
        id(parameter)
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
    }
    found: dict[str, torch.Tensor] = {}
    for key, (shape, dtype) in stored.items():
        kind, _, rest = key.partition("/")
        name, _, _ = rest.rpartition("/")
        if kind != "optimizer" or name not in parameters:
            continue
        parameter = parameters[name]
        if shape == tuple(parameter.shape) and shape:
            found[key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        else:
            beside = bool(shape) or id(parameter) in counts_beside
            found[key] = torch.zeros(shape, dtype=dtype, device=parameter.device if beside else "cpu")
    return found


def _own_tensors(model: nn.Module, optimizer: Optimizer, stored: Shapes) -> dict[str, torch.Tensor]:
    """The storage of the state itself, of an optimiser that keeps its moments in classes of its own."""
    materialise(optimizer)
    return {key: value for key, value in optimizer_tensors(model, optimizer).items() if key in stored}


def restore_optimizer(
    model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> None:
    """Give the optimiser the state that was saved, in place of its own.

    How it computes (fused, foreach) stays as it was made: that belongs to the machine.
    """
    parameters = dict(model.named_parameters())
    state: dict[str, dict[str, Any]] = {name: dict(numbers) for name, numbers in settings["numbers"].items()}
    for key, tensor in tensors.items():
        name, _, quantity = key.removeprefix("optimizer/").rpartition("/")
        state.setdefault(name, {})[quantity] = tensor
    if not keeps_wrapped(optimizer):  # of such a one the state has been read in place
        optimizer.state.clear()
        for name, entries in state.items():
            optimizer.state[parameters[name]] = entries
    for group, saved in zip(optimizer.param_groups, settings["groups"], strict=True):
        for key, value in saved.items():
            if key != "params" and key not in _IMPLEMENTATION:
                group[key] = _like(group.get(key), value)


def _like(current: Any, saved: Any) -> Any:
    """JSON knows neither tuples nor tensors."""
    if isinstance(current, tuple):
        return tuple(saved)
    return torch.full_like(current, saved) if isinstance(current, torch.Tensor) else saved
