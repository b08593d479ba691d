"""The end of a batch over several processes: gradients summed, measured, clipped and applied.

Parameters may be plain tensors, or cut over processes in different ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from posttune.distributed.ranks import Ranks
from posttune.distributed.tensors import local


def sum_over_shares(params: Sequence[Parameter], ranks: Ranks) -> None:
    """Add the gradients of all shares of the rows, except where the sharding has done it."""
    rest = [param for param in params if not _summed(param)]
    if rest and not any(isinstance(param, DTensor) for param in rest):
        ranks.sum_grads(rest)
    elif rest:
        ranks.sum_grads([_Local(local(param.grad)) for param in rest if param.grad is not None])  # type: ignore[misc]


class _Local:
    """Stands for a parameter whose gradient lies here in part."""

    def __init__(self, grad: torch.Tensor) -> None:
        self.grad = grad


def _summed(param: Parameter) -> bool:
    return isinstance(param, DTensor) and "shard" in (param.device_mesh.mesh_dim_names or ())


def total_norm(params: Sequence[Parameter]) -> torch.Tensor:
    """The norm of the whole gradient, a plain scalar, equal on every process."""
    grads = [param.grad for param in params if param.grad is not None]
    if not any(isinstance(grad, DTensor) for grad in grads):
        return get_total_norm(grads)
    kinds: dict[object, list[torch.Tensor]] = {}
    for grad in grads:
        kinds.setdefault(_kind(grad), []).append(grad)
    return torch.stack([_squares(alike) for alike in kinds.values()]).sum().sqrt().float()


def _kind(tensor: torch.Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def _squares(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of squares, float64, of gradients that are cut alike."""
    total = get_total_norm([local(grad) for grad in grads]).double().square()
    first = grads[0]
    if isinstance(first, DTensor):
        for dimension, placement in enumerate(first.placements):
            assert not placement.is_partial(), "a gradient has not been summed"
            if not placement.is_replicate():
                dist.all_reduce(total, group=first.device_mesh.get_group(dimension))
    return total


def clip(params: Sequence[Parameter], limit: float, norm: torch.Tensor) -> None:
    """Scale the gradient down to ``limit`` where its norm is larger."""
    if not any(isinstance(param.grad, DTensor) for param in params):
        clip_grads_with_norm_(params, limit, norm)
        return
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for param in params:
        if param.grad is not None:
            local(param.grad).mul_(factor)


def step(optimizer: Optimizer) -> None:
    """One step. Torch's kernels for many tensors at a time take only tensors that are cut alike."""
    meshes: list[DeviceMesh | None] = []
    for group in optimizer.param_groups:
        meshes += [mesh for mesh in map(_mesh, group["params"]) if mesh not in meshes]
    for mesh in dict.fromkeys(meshes):
        with _only(optimizer, mesh):
            optimizer.step()


def _mesh(param: torch.Tensor) -> DeviceMesh | None:
    return param.device_mesh if isinstance(param, DTensor) else None


@contextmanager
def _only(optimizer: Optimizer, mesh: DeviceMesh | None) -> Iterator[None]:
    groups = optimizer.param_groups
    everything = [group["params"] for group in groups]
    try:
        for group, params in zip(groups, everything, strict=True):
            group["params"] = [param for param in params if _mesh(param) == mesh]
        yield
    finally:
        for group, params in zip(groups, everything, strict=True):
            group["params"] = params
