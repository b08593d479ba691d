"""The state of an optimiser as plain tensors, whatever classes of tensor it keeps.

torchao's moments are tensors of a class of their own around codes, scales and a table. Files and copies
deal with these inner ones: ``exp_avg.codes``, ``exp_avg.scale``, ``exp_avg.qmap``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def is_wrapped(value: object) -> bool:
    """Whether a tensor is made of others. Tensors that are cut over processes are not meant."""
    return (
        isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__") and not isinstance(value, DTensor)
    )


def inner_tensors(quantity: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors of ``value`` by name; of a plain one itself."""
    if not is_wrapped(value):
        yield quantity, value
        return
    names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        yield from inner_tensors(f"{quantity}.{name}", getattr(value, name))


def plain_state(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that an optimiser keeps of one parameter: its own storage, not copies."""
    return {
        name: tensor
        for quantity, value in state.items()
        if isinstance(value, Tensor)
        for name, tensor in inner_tensors(quantity, value)
    }


def moved(
    value: Tensor, device: torch.device, into: Mapping[str, Tensor] | None = None, at: str = ""
) -> Tensor:
    """``value`` on ``device``, made anew of moved inner tensors; ``into`` names tensors to copy into."""
    if is_wrapped(value):
        names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = {name: moved(getattr(value, name), device, into, f"{at}.{name}") for name in names}
        made: Tensor = type(value).__tensor_unflatten__(  # type: ignore[attr-defined]
            parts, context, value.shape, value.stride()
        )
        return made
    if into is not None and at in into:
        return into[at].copy_(value, non_blocking=True)
    return value.to(device, non_blocking=True)


def state_bytes(optimizer: Optimizer, device: torch.device | None = None) -> int:
    """Bytes of the optimiser's state, on ``device`` alone where one is given. Counts are left out."""
    total = 0
    for state in optimizer.state.values():
        for tensor in plain_state(state).values():
            if tensor.ndim and (device is None or tensor.device.type == device.type):
                total += tensor.numel() * tensor.element_size()
    return total


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """What is trained."""
    return [param for group in optimizer.param_groups for param in group["params"]]
