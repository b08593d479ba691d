"""The weights that SGLang computes with, under the names and in the shapes of the Hugging Face files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import torch
from posttune.engines.weights import digest
from torch import Tensor, nn

THREADS = 4
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def checksums(model: nn.Module) -> dict[str, str]:
    """SHA-256 of each tensor by Hugging Face name, fused ones split."""
    with ThreadPoolExecutor(THREADS) as pool:
        pending = {name: pool.submit(digest, tensor) for name, tensor in named_tensors(model)}
        return {name: task.result() for name, task in pending.items()}


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """One name for each tensor: a tied head has none of its own."""
    seen: set[int] = set()
    with torch.no_grad():
        for path, module in model.named_modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                rows = getattr(module, "org_vocab_size", None)  # the rest only pads a vocabulary
                tensor = parameter.data if rows is None else parameter.data[:rows]
                yield from _split(path, leaf, tensor, module)


def _split(path: str, leaf: str, tensor: Tensor, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    parent, _, last = path.rpartition(".")
    names, sizes = FUSED.get(last), cast("Sequence[int] | None", getattr(module, "output_sizes", None))
    if names is None or sizes is None or len(names) != len(sizes) or sum(sizes) != tensor.shape[0]:
        yield f"{path}.{leaf}", tensor
        return
    for name, part in zip(names, tensor.split(list(sizes)), strict=True):
        yield f"{parent}.{name}.{leaf}", part
