"""The weights that an engine computes with, under the names and in the shapes of the Hugging Face files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

from posttune.engines.weights import THREADS, Hashes

if TYPE_CHECKING:
    from torch import Tensor, nn

    Read = Callable[[nn.Module, str, nn.Parameter], Tensor]


def held_checksums(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, str]:
    """SHA-256 of each tensor, by name."""
    with ThreadPoolExecutor(THREADS) as pool:
        hashes = Hashes(pool)
        for name, tensor in tensors:
            hashes.add(name, tensor)
        return hashes.results()


def held_tensors(
    model: nn.Module, fused: Mapping[str, Sequence[str]], read: Read | None = None
) -> Iterator[tuple[str, Tensor]]:
    """One name for each tensor: a tied head has none of its own.

    ``fused``: names of modules that hold several of the files' matrices, and those of the parts, in order.
    ``read``: a parameter of a module, by its name there, as it was loaded.
    """
    import torch

    seen: set[int] = set()
    with torch.no_grad():
        for path, module in model.named_modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                tensor = read(module, leaf, parameter) if read else without_padding(module, parameter)
                yield from _split(path.replace(".base_layer", ""), leaf, tensor, module, fused)


def without_padding(module: nn.Module, parameter: nn.Parameter) -> Tensor:
    """Without the rows that only pad a vocabulary."""
    rows = getattr(module, "org_vocab_size", None)
    return parameter.data if rows is None else parameter.data[:rows]


def _split(
    path: str, leaf: str, tensor: Tensor, module: nn.Module, fused: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, Tensor]]:
    parent, _, last = path.rpartition(".")
    names, sizes = fused.get(last), cast("Sequence[int] | None", getattr(module, "output_sizes", None))
    if names is None or sizes is None or len(names) != len(sizes) or sum(sizes) != tensor.shape[0]:
        yield f"{path}.{leaf}", tensor
        return
    for name, part in zip(names, tensor.split(list(sizes)), strict=True):
        yield f"{parent}.{name}.{leaf}" if parent else f"{name}.{leaf}", part
