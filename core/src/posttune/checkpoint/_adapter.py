"""Writing adapters as peft's own folder, and reading it back on the model that they belong to."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import cast

import peft
import torch
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from posttune.checkpoint._export import export_tensor
from posttune.checkpoint._verify import TOLERANCE, check_tokenizer, differs, logits_of, probe, same_bits
from posttune.checkpoint.card import card
from posttune.checkpoint.peft_folder import WEIGHTS, PeftFolder
from posttune.checkpoint.sources import LiveModel, ModelSource, open_source
from posttune.errors import UserError
from posttune.models.heads import find_head
from posttune.models.lora import ADAPTER, inner_model
from posttune.types import ExportReport, Verification

_FLOOR = 1e-5


def write_adapter(source: ModelSource, folder: Path, dtype: str) -> ExportReport:
    """Write the adapters of ``source``. Raises UserError where it has none, or their model is no folder."""
    base = _base_of(source)
    model = cast(peft.PeftModel, source.load_model())
    if find_head(inner_model(model)) is not None:
        what = "its scalar head is trained whole, and is no adapter"
        raise UserError(what, who="lora_adapter", fix="use the exporter hf, which merges the adapters")
    tensors = _tensors(model, dtype)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    settings = copy.deepcopy(model.peft_config[ADAPTER])
    settings.base_model_name_or_path, settings.inference_mode = str(base), True
    settings.save_pretrained(str(folder))
    source.write_companions(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)  # that is the base model's
    parameters = sum(tensor.numel() for tensor in tensors.values())
    name = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    (folder / "README.md").write_text(_card(source, base, parameters, name), encoding="utf-8")
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return ExportReport(files=tuple(files), parameters=parameters, dtype=name)


def verify_adapter(source: ModelSource, folder: Path) -> Verification:
    """Put what was written on the base model by peft, and compare logits with the source's.

    Raises ExportError where a tensor or the tokenizer is not what was to be written.
    """
    live = isinstance(source, LiveModel)
    trained = source.load_model() if live else source.load_model(dtype=torch.float32)
    stored = load_file(folder / WEIGHTS)
    dtype = next(iter(stored.values())).dtype
    own = _tensors(cast(peft.PeftModel, trained), str(dtype).removeprefix("torch."))
    if stored.keys() != own.keys():
        raise differs(folder, f"{min(stored.keys() ^ own.keys())} is on one side alone")
    wrong = next((name for name, tensor in own.items() if not same_bits(tensor, stored[name])), None)
    if wrong is not None:
        raise differs(folder, f"{wrong} holds other values")
    ids, inner = probe(source), inner_model(trained)
    compute, device, attention = inner.dtype, inner.device, inner.config._attn_implementation
    expected = logits_of(trained, ids)
    exact = all(
        tensor.dtype == dtype
        for tensor in get_peft_model_state_dict(trained, save_embedding_layers=False).values()
    )
    del trained, inner
    check_tokenizer(source, folder)
    written = PeftFolder(folder, base=source.base).load_model(dtype=compute, attention=attention)
    found = logits_of(torch.nn.Module.to(written, device), ids)
    share = max(TOLERANCE[each] for each in (compute, *(() if exact else (dtype,))))
    return Verification(
        max_abs_logit_difference=(found - expected).abs().max().item(),
        tolerance=max(_FLOOR, share * expected.abs().max().item()),
        checked_tokens=ids.numel(),
    )


def _base_of(source: ModelSource) -> Path:
    who = source.name
    if not source.lora:
        what = "has no adapters: all of its weights were trained"
        raise UserError(what, who=who, fix="use the exporter hf")
    if source.base is None:
        what = "nothing says which folder holds the model that its adapters belong to"
        raise UserError(what, who=who, fix="name that folder by --base DIR, or use the exporter hf")
    if open_source(source.base).kind != "hf":
        what = f"its adapters belong to {source.base}, which is no Hugging Face folder: peft cannot load it"
        fix = f"run `posttune export {source.base} --to DIR`, then name DIR by --base"
        raise UserError(what, who=who, fix=fix)
    return source.base


def _tensors(model: peft.PeftModel, dtype: str) -> dict[str, torch.Tensor]:
    """Under peft's names, without the adapter's own."""
    found = get_peft_model_state_dict(model, save_embedding_layers=False)
    chosen = None if dtype == "keep" else cast(torch.dtype, getattr(torch, dtype))
    return {name: export_tensor(tensor, chosen or tensor.dtype) for name, tensor in found.items()}


def _card(source: ModelSource, base: Path, parameters: int, dtype: str) -> str:
    usage = (
        "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{base}")\n'
        'model = PeftModel.from_pretrained(model, "path/of/this/folder")'
    )
    return card(
        name=source.name,
        family=source.config.model_type,
        kind="LoRA adapter",
        parameters=parameters,
        dtype=dtype,
        origin=f", of {base.name}",
        usage=usage,
        task="text-generation",
        place=source.place,
        library="peft",
        base=str(base),
    )
