"""Models and moments that wait in the host's memory while they are not in use.

Whoever uses a model says so: ``with resident(model): ...``. What was never made a lodger is always there,
and the block costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from posttune.errors import UserError
from posttune.memory.host import host_empty
from posttune.models.lora import inner_model
from posttune.optim.states import moved, plain_state
from posttune.optim.stepping import counts_beside, travels


class Lodger:
    """A model whose weights are on the device only while they are used. Buffers always are.

    The host's copies are made once; they are what a checkpoint reads and fills.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._depth = 0
        self._homes: list[tuple[nn.Parameter, Tensor]] = []
        for param in model.parameters():
            if isinstance(param, DTensor):
                fix = "leave it out, or set parallel.data_shard: 1"
                raise UserError("it does not go with weights that are cut", who="memory.offload", fix=fix)
            home = host_empty(param.shape, param.dtype, pinned=device.type == "cuda")
            home.copy_(param.data)
            param.data = home
            self._homes.append((param, home))
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)

    @property
    def host_bytes(self) -> int:
        """What the host's copies take."""
        return sum(home.nbytes for _, home in self._homes)

    def enter(self) -> None:
        """Bring the weights. May be nested."""
        self._depth += 1
        if self._depth == 1:
            for param, home in self._homes:
                param.data = _copy(home, self._device)

    def leave(self, *, changed: bool) -> None:
        """Take the weights back; those that nobody changed are only given up on the device."""
        self._depth -= 1
        if self._depth:
            return
        for param, home in self._homes:
            if changed and param.requires_grad:
                home.copy_(param.data, non_blocking=True)
        _wait(self._device)
        for param, home in self._homes:
            param.data = home
        give_back(self._device)


class LodgingOptimizer:
    """An optimiser whose moments are on the device only while it is used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._homes: dict[Tensor, dict[str, Tensor]] = {}

    @property
    def host_bytes(self) -> int:
        """What the host's copies take."""
        return sum(home.nbytes for homes in self._homes.values() for home in homes.values())

    def enter(self, optimizer: Optimizer) -> None:
        """Bring what there is."""
        beside = counts_beside(optimizer)
        for param, state in optimizer.state.items():
            for name, value in state.items():
                if travels(value):
                    self._homes.setdefault(param, {}).update(plain_state({name: value}))
                if travels(value) or (beside and isinstance(value, Tensor)):
                    state[name] = moved(value, self._device)

    def leave(self, optimizer: Optimizer) -> None:
        """Take it back, and what was made in between."""
        cpu = torch.device("cpu")
        for param, state in optimizer.state.items():
            for name, value in state.items():
                if travels(value):
                    homes = self._homes.setdefault(param, {})
                    for inner, tensor in plain_state({name: value}).items():
                        if inner not in homes:
                            pinned = tensor.device.type == "cuda"
                            homes[inner] = host_empty(tensor.shape, tensor.dtype, pinned=pinned)
                    state[name] = moved(value, cpu, homes, name)
        _wait(self._device)
        give_back(self._device)


_LODGERS: WeakKeyDictionary[nn.Module, Lodger] = WeakKeyDictionary()
_OPTIMIZERS: WeakKeyDictionary[Optimizer, LodgingOptimizer] = WeakKeyDictionary()


def lodge(model: nn.Module, device: torch.device) -> None:
    """Let the model wait in the host's memory from now on. Raises `UserError` for weights that are cut."""
    _LODGERS[inner_model(model)] = Lodger(model, device)


def lodge_optimizer(optimizer: Optimizer, device: torch.device) -> None:
    """The same for an optimiser's moments."""
    _OPTIMIZERS[optimizer] = LodgingOptimizer(device)


def lodges(model: nn.Module) -> bool:
    """Whether the model waits in the host's memory."""
    return inner_model(model) in _LODGERS


def host_bytes() -> int:
    """What waits, or has its place, in the host's memory."""
    models, moments = _LODGERS.values(), _OPTIMIZERS.values()
    return sum(each.host_bytes for each in models) + sum(each.host_bytes for each in moments)


@contextmanager
def resident(model: nn.Module, optimizer: Optimizer | None = None) -> Iterator[None]:
    """The model is on the device; with ``optimizer``, which changes it, its moments are too."""
    lodger = _LODGERS.get(inner_model(model))
    with ExitStack() as stack:
        if lodger is not None:
            lodger.enter()
            stack.callback(lodger.leave, changed=optimizer is not None)
        if optimizer is not None and optimizer in _OPTIMIZERS:
            _OPTIMIZERS[optimizer].enter(optimizer)
            stack.callback(_OPTIMIZERS[optimizer].leave, optimizer)
        yield


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    """On another device a copy; on the same too, so that a CPU does what a GPU does."""
    if tensor.device.type == device.type:
        return tensor.clone()
    return tensor.to(device, non_blocking=True)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def give_back(device: torch.device) -> None:
    """Let an engine beside the trainer have what is free now."""
    if device.type == "cuda":
        torch.cuda.ipc_collect()  # what was lent to an engine's process, and is free since
        torch.cuda.empty_cache()
