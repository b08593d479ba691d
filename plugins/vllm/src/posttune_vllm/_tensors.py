"""Weights inside a worker: loaded in place, and read back for checksums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from posttune.engines.held import held_checksums, held_tensors, without_padding
from torch import Tensor, nn

if TYPE_CHECKING:
    from posttune_vllm.adapters.base import Adapter
    from posttune_vllm.worker import Tensors

READ_ROWS = 1024  # of a packed matrix that are unpacked at a time


def load_all(worker: Any, tensors: Tensors, version: Adapter) -> int:
    """Take a whole checkpoint. Returns how many tensors came; raises if a parameter got none."""
    model, counted = version.model_of(worker), _Counted(tensors)
    if repacked(model):
        try:
            version.reload(worker, counted.kept() if on_gpu(model) else counted)
        except BaseException:
            version.mend(worker)
            raise
        if not on_gpu(model):
            version.refresh_tied_head(model)
    else:
        _check_complete(model, _load_plain(model, counted))
    return counted.count


def load_some(worker: Any, tensors: Tensors, version: Adapter) -> int:
    """Take a part of a checkpoint; only for weights that are held as they were loaded."""
    model, counted = version.model_of(worker), _Counted(tensors)
    if repacked(model):
        raise RuntimeError("this model's weights are repacked by the engine: they are taken all at once")
    _load_plain(model, counted)
    return counted.count


def checksums(model: nn.Module) -> dict[str, str]:
    """SHA-256 of each tensor by Hugging Face name, fused ones split, as the engine computes with them."""
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    return held_checksums(held_tensors(model, packed, _read))


def _read(module: nn.Module, leaf: str, parameter: nn.Parameter) -> Tensor:
    """A parameter as it was loaded: unpacked, and without the rows that only pad a vocabulary."""
    if leaf == "weight" and parameter.numel() == 0 and hasattr(module, "cpu_linear"):
        return _unpacked(module, parameter.dtype)
    tensor = without_padding(module, parameter)
    return tensor.to(_dtype(module, tensor))


def _unpacked(module: nn.Module, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] of a layer that holds it packed only: what it does to the unit vectors.

    Exact: every sum has one term that is not 0. The sign of a zero is lost.
    """
    size = int(cast(Any, module).input_size_per_partition)
    linear, weight, parts = cast(Any, module).cpu_linear, cast(Any, module).weight, []
    for start in range(0, size, READ_ROWS):
        stop = min(start + READ_ROWS, size)
        unit = torch.zeros(stop - start, size, dtype=dtype)
        unit[torch.arange(stop - start), torch.arange(start, stop)] = 1
        parts.append(linear(unit, weight, None))
    return torch.cat(parts).t().contiguous()


def _dtype(module: nn.Module, tensor: Tensor) -> torch.dtype:
    """A bias that was widened for the packed kernel goes back to the layer's type."""
    weight = getattr(module, "weight", None)
    if hasattr(module, "cpu_linear") and isinstance(weight, Tensor) and tensor.dim() == 1:
        return weight.dtype
    return tensor.dtype


def _load_plain(model: nn.Module, tensors: Any) -> set[str] | None:
    with torch.no_grad():
        loaded: set[str] | None = cast(Any, model).load_weights(tensors)
    if on_gpu(model):
        torch.cuda.synchronize()  # whoever lent the tensors may change them once this returns
    return loaded


def _check_complete(model: nn.Module, loaded: set[str] | None) -> None:
    missing = sorted({name for name, _ in model.named_parameters()} - loaded) if loaded else []
    if missing:
        raise RuntimeError(
            f"{len(missing)} of the engine's parameters got no weight, {missing[0]} among them"
        )


def repacked(model: nn.Module) -> bool:
    """Whether the engine holds other layouts than it loads: CPU kernels, and mixtures of experts."""
    if not on_gpu(model):
        return True
    return any("FusedMoE" in type(module).__name__ for module in model.modules())


def on_gpu(model: nn.Module) -> bool:
    """Whether its weights are on a GPU."""
    return next(model.parameters()).is_cuda


class _Counted:
    """Passes tensors on and counts them."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self.count = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for pair in self._tensors:
            self.count += 1
            yield pair

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """As copies: a reload keeps tensors until their layer is whole, lent memory may be gone by then."""
        for name, tensor in self:
            yield name, tensor.clone()
