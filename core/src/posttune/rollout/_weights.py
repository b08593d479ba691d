"""Weights of a generating model: checked and taken in place, and their checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttune.errors import RunError
from posttune.models.lora import inner_model
from posttune.models.params import named_hf_tensors
from posttune.nearest import nearest

WHO = "rollout_backend 'hf'"
SAME_MODEL = "hand over the weights of the model that the engine was started with, by Hugging Face name"


def known_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Shape of every tensor that ``load_weights`` may name; a tied weight goes by any of its names."""
    plain = inner_model(model).state_dict(keep_vars=True)
    own = {name.replace(".base_layer.", "."): t.shape for name, t in plain.items() if ".lora_" not in name}
    return own | {name: tensor.shape for name, tensor in named_hf_tensors(model)}


def check_names(names: Iterable[str], known: Mapping[str, object]) -> None:
    """Refuse a name that the model does not have, with the nearest that it has."""
    for name in names:
        if name not in known:
            likely = nearest(name, known)
            hint = f" (did you mean {likely!r}?)" if likely else ""
            raise RunError(
                f"load_weights: the model has no tensor {name!r}{hint}; nothing was loaded",
                who=WHO,
                fix=SAME_MODEL,
            )


def load(model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy all tensors in place, or raise RunError before any is copied."""
    given: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name in given:
            raise RunError(
                f"load_weights: {name!r} was given twice; nothing was loaded",
                who=WHO,
                fix="give each tensor once",
            )
        given[name] = tensor
    known = known_shapes(model)
    check_names(given, known)
    _check_shapes(given, known)
    _check_complete(model, given)
    own = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in _as_computed(model, given).items():
            own[name].copy_(tensor)


def checksums(model: nn.Module) -> dict[str, str]:
    """SHA-256 of each tensor's bytes, by Hugging Face name."""
    return {name: _digest(tensor) for name, tensor in named_hf_tensors(model)}


def _check_shapes(given: Mapping[str, Tensor], known: Mapping[str, torch.Size]) -> None:
    for name, tensor in given.items():
        if tensor.shape != known[name]:
            raise RunError(
                f"load_weights: {name!r} has shape {list(tensor.shape)}, the model wants {list(known[name])}"
                "; nothing was loaded",
                who=WHO,
                fix=SAME_MODEL,
            )


def _check_complete(model: PreTrainedModel, given: Mapping[str, Tensor]) -> None:
    """Every parameter must be given, a tied one under any of its names. Buffers may be left out."""
    names_of: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), set()).add(name)
    aliases = {name: names for names in names_of.values() for name in names}
    optional = {name for name, _ in model.named_buffers()}
    wanted = [name for name, _ in named_hf_tensors(model) if name not in optional]
    missing = [name for name in wanted if not aliases.get(name, {name}) & given.keys()]
    if missing:
        shown = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else "")
        what = f"{len(missing)} of {len(wanted)} tensors are missing ({shown})"
        raise RunError(
            f"load_weights: {what}; nothing was loaded",
            who=WHO,
            fix="hand over every weight; of a LoRA model the merged ones",
        )


def _as_computed(model: PreTrainedModel, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as the module holds them: some architectures compute with fused experts."""
    if given.keys() <= model.state_dict(keep_vars=True).keys():
        return given
    fresh = type(model).from_pretrained(None, config=model.config, state_dict=given, dtype=model.dtype)
    return cast("dict[str, Tensor]", fresh.state_dict())


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
