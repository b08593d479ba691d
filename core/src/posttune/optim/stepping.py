"""Steps of an optimiser: all parameters at once, or one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from posttune.distributed import gradients
from posttune.memory.host import host_empty
from posttune.optim.make import set_group_lr, set_lr
from posttune.optim.states import moved, parameters_of, plain_state


@contextmanager
def uncompiled(device: torch.device) -> Iterator[None]:
    """On a CPU let what torchao would compile run as it is written: it needs no C++ compiler then."""
    with torch.compiler.set_stance("force_eager") if device.type == "cpu" else contextlib.nullcontext():
        yield


def step_all(optimizer: Optimizer, device: torch.device) -> None:
    """One step of every parameter that has a gradient."""
    with uncompiled(device):
        gradients.step(optimizer)


def step_one(optimizer: Optimizer, param: nn.Parameter) -> None:
    """One step of ``param`` alone."""
    everything = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [each for each in group["params"] if each is param]
        with uncompiled(param.device):
            optimizer.step()
    finally:
        for group, params in zip(optimizer.param_groups, everything, strict=True):
            group["params"] = params


class HostStates:
    """An optimiser whose state lies in the host's memory; that of one parameter at a time is on the device.

    The host's copies are pinned where there is a GPU, made once, and written in place ever after.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step_all(self) -> None:
        """One step of every parameter that has a gradient, small ones first, and the gradient given up.

        The large ones come when most gradients are gone, because their step needs most room.
        """
        for param in sorted(parameters_of(self.optimizer), key=torch.Tensor.numel):
            if param.grad is not None:
                self.step_one(param)
                param.grad = None
        self.settle()

    def settle(self) -> None:
        """Wait until the host's copies are what was computed."""
        if any(param.device.type == "cuda" for param in parameters_of(self.optimizer)):
            torch.cuda.synchronize()

    def step_one(self, param: nn.Parameter) -> None:
        """One step of ``param``, whose state comes and goes."""
        kept = self.optimizer.state.get(param, {})
        host = plain_state(kept)
        self._visit(param, kept)
        step_one(self.optimizer, param)
        self._leave(param, host)

    def _visit(self, param: nn.Parameter, kept: dict[str, Any]) -> None:
        beside = counts_beside(self.optimizer)
        if kept:
            self.optimizer.state[param] = {
                name: moved(value, param.device) if travels(value) or beside else value
                for name, value in kept.items()
            }

    def _leave(self, param: nn.Parameter, host: dict[str, Tensor]) -> None:
        state = self.optimizer.state[param]
        for name, value in state.items():
            if travels(value):
                places = host or _host_copies(name, value)
                state[name] = moved(value, torch.device("cpu"), places, name)


def travels(value: object) -> bool:
    """Whether it is worth moving: counts are not."""
    return isinstance(value, Tensor) and value.ndim > 0


def counts_beside(optimizer: Optimizer) -> bool:
    """Whether the counts must be on the device of the weights."""
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)


def _host_copies(name: str, value: Tensor) -> dict[str, Tensor]:
    pinned = value.device.type == "cuda"
    return {
        inner: host_empty(tensor.shape, tensor.dtype, pinned=pinned)
        for inner, tensor in plain_state({name: value}).items()
    }


def keeps_wrapped(optimizer: Optimizer) -> bool:
    """Whether its moments are tensors of a class of the library's own."""
    return type(optimizer).__module__.startswith("torchao.")


def materialise(optimizer: Optimizer) -> None:
    """Give every parameter its state, as the first step would make it; the weights stay as they are.

    A step with gradients of zero and a learning rate of zero moves nothing and rounds nothing: what a
    weight is can be told exactly in its own type.
    """
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    for param in parameters_of(optimizer):
        if param not in optimizer.state:
            set_lr(optimizer, 0.0)
            before, param.grad = param.grad, torch.zeros_like(param)
            step_one(optimizer, param)
            param.grad = before
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        set_group_lr(group, rate)
