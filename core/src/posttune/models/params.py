"""The weights of a model under the names that Hugging Face files use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from posttune.distributed.tensors import full, settle
from posttune.models.lora import inner_model, is_adapted, merged_weight

_WRAPPED = ".base_layer."


def named_hf_tensors(model: nn.Module, *, exact: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight once, as (Hugging Face name, detached tensor); adapters are merged on the fly.

    A weight that is cut over processes comes whole, gathered as it is asked for: every process must
    then ask for all.

    A merged weight has the model's own type, or with ``exact`` the float32 that it was computed in.
    Of tied weights only the first name comes (the input embedding's). Nothing is copied but what a
    merge must create, one tensor at a time, unless the architecture stores its weights in another
    shape than it computes with (fused experts).
    """
    inner = inner_model(model)
    settle(inner)
    if _stored_differently(inner):
        yield from revert_weight_conversion(inner, dict(merged_state(inner, exact=exact))).items()
    else:
        yield from merged_state(inner, exact=exact)


def merged_state(model: PreTrainedModel, *, exact: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """As `named_hf_tensors`, but named and shaped as in the module itself, without its adapters."""
    wrapped = {name: module for name, module in model.named_modules() if is_adapted(module)}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if ".lora_" in name or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        layer = name.partition(_WRAPPED)[0]
        if layer in wrapped and name.endswith(f"{_WRAPPED}weight"):
            weight = merged_weight(wrapped[layer])
            yield name.replace(_WRAPPED, "."), weight if exact else weight.to(tensor.dtype)
        else:
            yield name.replace(_WRAPPED, "."), full(tensor.detach())


def _stored_differently(model: PreTrainedModel) -> bool:
    conversions: list[Any] | None = getattr(model, "_weight_conversions", None)
    if conversions is None:
        found = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [step for step in found if not isinstance(step, PrefixChange)]
    return bool(conversions)


def embeddings_tied(model: nn.Module) -> bool:
    """Whether the output embedding is the very tensor of the input embedding."""
    inner = inner_model(model)
    head = inner.get_output_embeddings()
    return head is not None and head.weight is inner.get_input_embeddings().weight


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Change the type of the floating parameters, in place. Unlike ``model.to``, buffers keep theirs.

    Rotary frequencies are such buffers: rounded to half precision they turn long positions wrong.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def count_parameters(model: nn.Module, *, trainable: bool = False) -> int:
    """Parameters, tied ones once."""
    chosen = (p for p in model.parameters() if p.requires_grad or not trainable)
    return sum(parameter.numel() for parameter in chosen)
