"""A Hugging Face folder for the engine, where the model has none: written from the trainer's module."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttune.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn


def folder_for(path: Path | None, live: Any, scratch: Path, who: str) -> Path:
    """``path`` where an engine can load it, else the live model saved in ``scratch``. Raises UserError."""
    if path is not None and (path / "config.json").is_file() and not (path / "adapter_config.json").exists():
        return path
    if live is None:
        what = (
            f"{path} is no Hugging Face folder"
            if path
            else "neither a model folder nor a live model was given"
        )
        raise UserError(what, who=who, fix="export the model first: posttune export")
    _refuse_cut(live, who)
    from posttune.models.lora import is_lora
    from posttune.models.params import merged_state

    folder = scratch / "model"
    if is_lora(live):
        inner: Any = live.get_base_model()
        inner.save_pretrained(folder, state_dict=dict(merged_state(inner)))
    else:
        live.save_pretrained(folder)
    return folder


def _refuse_cut(live: nn.Module, who: str) -> None:
    from torch.distributed.tensor import DTensor

    if any(isinstance(parameter, DTensor) for parameter in live.parameters()):
        what = "weights that are cut over processes are in no Hugging Face folder that an engine could read"
        fix = "export the model first: posttune export, and name that folder as the stage's model"
        raise UserError(what, who=who, fix=fix)


def save_tokenizer(tokenizer: Any, scratch: Path) -> Path | None:
    """The run's own tokenizer, which need not be the folder's; None where there is none."""
    if tokenizer is None:
        return None
    tokenizer.save_pretrained(scratch / "tokenizer")
    return scratch / "tokenizer"


def write_adapter(tensors: Iterable[tuple[str, torch.Tensor]], like: Path, scratch: Path, who: str) -> Path:
    """A PEFT folder in ``scratch`` with these tensors and the configuration of another."""
    from safetensors.torch import save_file

    source = like / "adapter_config.json"
    if not source.is_file():
        what = f"{like} holds no adapter_config.json, which says how the adapter is applied"
        raise UserError(what, who=who, fix="name the folder of a PEFT adapter")
    rank = json.loads(source.read_text(encoding="utf-8")).get("r")
    if not isinstance(rank, int):
        raise UserError(f"{source} says no rank", who=who, fix="save the adapter with peft again")
    folder = Path(tempfile.mkdtemp(prefix="adapter-", dir=scratch))
    shutil.copyfile(source, folder / source.name)
    save_file(
        {name: t.detach().cpu().contiguous() for name, t in tensors}, folder / "adapter_model.safetensors"
    )
    return folder
