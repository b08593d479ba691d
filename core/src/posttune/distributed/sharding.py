"""Cutting a model over processes: FSDP2 (`fully_shard`) over data, `parallelize_module` within matrices.

Weights are cut in place, and stay the parameters that an optimiser, a checkpoint and a hand-over see: as
DTensors. What is left uncut (a scalar head) is held by every process.
"""

from __future__ import annotations

import fnmatch
from datetime import timedelta
from functools import lru_cache
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from posttune.config.parallel import Layout, ParallelConfig
from posttune.distributed.ranks import NCCL_LATER_S, Ranks, at_close
from posttune.distributed.tensors import RESHARD
from posttune.errors import ModelError
from posttune.models.heads import find_head
from posttune.models.lora import ADAPTER, inner_model, is_adapted

DIMENSIONS = ("replicate", "shard", "tensor")
_STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def cuts(ranks: Ranks) -> bool:
    """Whether models are cut at all: they are then loaded beside the device, and moved part by part."""
    return ranks.layout.sharded or ranks.layout.tensor > 1


def place(model: PreTrainedModel, ranks: Ranks) -> PreTrainedModel:
    """The model on this process's device, cut as the run says. In place.

    Every process calls it with the same weights. Raises ModelError where the architecture cannot be
    cut so.
    """
    layout = ranks.layout
    if cuts(ranks):
        mesh = make_mesh(ranks.device.type, layout, ranks.deadline_s)
        inner = inner_model(model)
        if layout.tensor > 1:
            _split_matrices(inner, mesh["tensor"])
        if layout.sharded:
            _shard(inner, mesh[DIMENSIONS[:2]] if layout.replicate > 1 else mesh["shard"], ranks.parallel)
    cast(nn.Module, model).to(ranks.device)
    return model


@lru_cache(maxsize=1)
def make_mesh(device_type: str, layout: Layout, deadline_s: float) -> DeviceMesh:
    """The processes as a box with named sides; made once, by all of them."""
    sizes = (layout.replicate, layout.shard, layout.tensor)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=DIMENSIONS)
    later = NCCL_LATER_S if device_type == "cuda" else 0.0
    for name in DIMENSIONS:
        _set_pg_timeout(timedelta(seconds=deadline_s + later), mesh.get_group(name))
    return mesh


at_close.append(make_mesh.cache_clear)


def _shard(inner: PreTrainedModel, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Each layer gathers its weights when it computes, and gives them back.

    With a scalar head the body is cut and the head is not: it is asked outside of a forward pass.
    """
    root: nn.Module = inner if find_head(inner) is None else inner.base_model
    policy = MixedPrecisionPolicy(
        param_dtype=_type(config.param_dtype), reduce_dtype=_type(config.reduce_dtype)
    )
    layers = [module for module in root.modules() if type(module).__name__ in _layer_names(inner)]
    for module in [*layers, root]:
        fully_shard(module, mesh=mesh, reshard_after_forward=config.reshard_after_forward, mp_policy=policy)
        unit = cast(FSDPModule, module)
        unit.set_gradient_divide_factor(1.0)  # a loss is over the rows of all processes: gradients add up
        unit.set_force_sum_reduction_for_comms(True)
        setattr(module, RESHARD, config.reshard_after_forward)


def _layer_names(inner: PreTrainedModel) -> set[str]:
    return set(getattr(inner, "_no_split_modules", None) or ())


def _type(name: str | None) -> torch.dtype | None:
    return None if name is None else cast(torch.dtype, getattr(torch, name))


def _split_matrices(inner: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Follow transformers' plan for the architecture's attention and MLP; embeddings stay whole."""
    body = inner.base_model
    plan = _plan(inner, mesh.size())
    for name, module in list(body.named_modules()):
        style = _style_of(name, plan)
        if style is not None:
            parallelize_module(module, mesh, _inside(module, style), src_data_rank=None)


def _plan(inner: PreTrainedModel, size: int) -> dict[str, str]:
    config = inner.config.get_text_config()
    plan: dict[str, str] = dict(getattr(config, "base_model_tp_plan", None) or {})
    strange = sorted({style for style in plan.values() if style not in _STYLES})
    what = None
    if not plan:
        what = "transformers has no plan to split its matrices"
    elif strange:
        what = f"its plan to split matrices asks for {', '.join(strange)}, which is not supported"
    elif heads := [n for n in _heads(config) if n % size]:
        what = f"its {heads[0]} attention heads cannot be shared by {size} processes"
    if what is not None:
        fix = "set parallel.tensor: 1, and data_shard to save memory"
        raise ModelError(what, who=f"parallel.tensor: {type(inner).__name__}", fix=fix)
    return plan


def _heads(config: Any) -> list[int]:
    heads = int(config.num_attention_heads)
    return [heads, int(getattr(config, "num_key_value_heads", None) or heads)]


def _style_of(name: str, plan: dict[str, str]) -> str | None:
    return next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(name, pattern)), None)


def _inside(module: nn.Module, style: str) -> ParallelStyle | dict[str, ParallelStyle]:
    """The style of a linear layer; of one with adapters, of the parts whose side is cut."""
    made = _STYLES[style]()
    if not is_adapted(module):
        return made
    adapter = "lora_B" if style == "colwise" else "lora_A"
    return {"base_layer": made, f"{adapter}.{ADAPTER}": _STYLES[style]()}
