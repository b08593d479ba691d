"""A Hugging Face folder for the engine, where the model has none: written from the trainer's module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from posttune.errors import UserError
from torch import nn

from posttune_vllm.installed import WHO


def folder_for(path: Path | None, live: Any, scratch: Path) -> Path:
    """``path`` where vLLM can load it, else the live model saved in ``scratch``."""
    if path is not None and (path / "config.json").is_file() and not (path / "adapter_config.json").exists():
        return path
    if live is None:
        what = (
            f"{path} is no Hugging Face folder"
            if path
            else "neither a model folder nor a live model was given"
        )
        raise UserError(what, who=WHO, fix="export the model first: posttune export")
    folder = scratch / "model"
    if isinstance(live, PeftModel):
        inner: Any = live.get_base_model()
        inner.save_pretrained(folder, state_dict=_merged(inner))
    else:
        live.save_pretrained(folder)
    return folder


def save_tokenizer(tokenizer: Any, scratch: Path) -> Path | None:
    """The run's own tokenizer, which need not be the folder's; None where there is none."""
    if tokenizer is None:
        return None
    tokenizer.save_pretrained(scratch / "tokenizer")
    return scratch / "tokenizer"


def _merged(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights with the adapters added to them; the module keeps its own."""
    wrapped = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if ".lora_" in name:
            continue
        layer, _, rest = name.partition(".base_layer.")
        value = tensor.detach()
        if rest == "weight" and layer in wrapped:
            module: Any = wrapped[layer]
            with torch.no_grad():
                deltas = [module.get_delta_weight(adapter).float() for adapter in module.active_adapters]
                value = (value.float() + sum(deltas)).to(value.dtype)
        found[name.replace(".base_layer.", ".")] = value
    return found
