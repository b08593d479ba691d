"""Tensors that are cut over processes: whole, and as the part that lies here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor; of one that is cut a copy, which every process must ask for."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part that lies here, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_cut(model: nn.Module) -> bool:
    """Whether a parameter is spread over processes."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters()) or bool(units(model))


def units(model: nn.Module) -> list[FSDPModule]:
    """The modules whose weights are gathered together, outermost first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def settle(model: nn.Module) -> None:
    """Let the parameters be the cut ones again, where a forward pass left gathered ones."""
    for unit in units(model):
        unit.reshard()


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Keep the weights gathered, so that a process may make any number of passes by itself.

    Every process enters and leaves. It takes the memory of the whole model; no gradients inside.
    """
    found = units(model)
    for unit in found:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in found:
            unit.reshard()
            unit.set_reshard_after_forward(_resharded(unit), recurse=False)


def _resharded(unit: FSDPModule) -> bool:
    return bool(getattr(unit, RESHARD, True))


RESHARD = "posttune_reshard_after_forward"


def least(model: nn.Module, number: int) -> int:
    """The smallest number of the processes that work on the same rows as this one.

    They must plan alike what they generate together.
    """
    meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    mesh = next((mesh for mesh in meshes if "tensor" in (mesh.mesh_dim_names or ())), None)
    if mesh is None:
        return number
    found = torch.tensor(number, dtype=torch.int64, device=mesh.device_type)
    dist.all_reduce(found, dist.ReduceOp.MIN, group=mesh.get_group("tensor"))
    return int(found)
