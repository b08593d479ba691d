"""What the forward pass leaves for the backward pass, kept in the host's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from posttune.models.lora import inner_model

_SMALL = 1 << 20  # bytes; smaller tensors stay where they are


@contextmanager
def kept_on_host(model: nn.Module) -> Iterator[None]:
    """Tensors that are saved for the backward pass travel to pinned memory and back; weights do not.

    With gradient checkpointing these are the inputs of the layers. On a CPU they are copied, so that it
    does what a GPU does.
    """
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        if tensor.nbytes < _SMALL or tensor.untyped_storage().data_ptr() in weights:
            return tensor.device, tensor
        home = torch.empty(
            tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type == "cuda"
        )
        return tensor.device, home.copy_(tensor, non_blocking=True)

    def unpack(packed: Any) -> Tensor:
        device, tensor = packed
        found: Tensor = tensor.to(device, non_blocking=True)
        return found

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


_CHOSEN: WeakSet[nn.Module] = WeakSet()


def keep_on_host(model: nn.Module) -> None:
    """Let what ``model`` saves for its backward passes wait on the host from now on."""
    _CHOSEN.add(inner_model(model))


def saving(model: nn.Module) -> AbstractContextManager[None]:
    """Around a forward pass of ``model``: as it was chosen for it."""
    chosen = inner_model(model) in _CHOSEN and torch.is_grad_enabled()
    return kept_on_host(model) if chosen else nullcontext()
