"""A model that is cut over processes, whole again on the first one's CPU, to be exported."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from posttune.checkpoint._export import export_model
from posttune.checkpoint._verify import logits_of, probe
from posttune.checkpoint.card import RunPlace
from posttune.checkpoint.sources import LiveModel
from posttune.distributed.ranks import Ranks
from posttune.distributed.tensors import full, is_cut, settle, whole
from posttune.errors import ExportError
from posttune.models.hf_folder import auto_class
from posttune.models.lora import apply_lora, describe, from_description, inner_model

log = logging.getLogger("posttune.checkpoint")
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}


def export_live(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    destination: Path,
    ranks: Ranks,
    *,
    replace: bool = False,
    name: str = "model",
    place: RunPlace | None = None,
) -> None:
    """Write the trainer's model as a Hugging Face folder. Every process calls it, the first one writes.

    ``name`` and ``place`` are for the model card.
    Raises ExportError, also where the gathered weights answer otherwise than the cut ones.
    """
    found = gathered(model, ranks) if is_cut(model) else model
    if is_cut(model):
        _compare(model, found, tokenizer, ranks)
    with ranks.alone("export"):
        if ranks.main and found is not None:
            export_model(LiveModel(found, tokenizer, name=name, place=place), destination, replace=replace)


def gathered(model: PreTrainedModel, ranks: Ranks) -> PreTrainedModel | None:
    """A plain copy on the first process's CPU, adapters beside the weights; None on the others.

    Weights come one by one, so a device holds one of them beside its share.
    """
    settle(model)
    copy = _empty_like(model) if ranks.main else None
    own = {} if copy is None else copy.state_dict(keep_vars=True)
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        weight = full(tensor.detach())
        if copy is not None:
            own[name].data.copy_(weight)
    return copy


def _empty_like(model: PreTrainedModel) -> PreTrainedModel:
    """The architecture, with adapters where there are any; its weights hold anything."""
    inner = inner_model(model)
    with no_init_weights():
        made = auto_class(inner.config).from_config(inner.config, dtype=inner.dtype)
    made.tie_weights()
    made.generation_config = inner.generation_config
    adapters = describe(model)
    if adapters is not None:
        made = apply_lora(made, from_description(adapters, who="model"), seed=0)
    cast(nn.Module, made).eval()
    return cast(PreTrainedModel, made)


def _compare(
    model: PreTrainedModel, copy: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase, ranks: Ranks
) -> None:
    """Every process asks the cut model, the first one the copy too."""
    ids = probe(LiveModel(copy, tokenizer)) if copy is not None else torch.zeros(0)
    ids = ranks.broadcast_object(ids)
    with whole(model):
        expected = logits_of(model, ids)
    difference = 0.0
    if copy is not None:
        found = logits_of(copy, ids)
        share = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
        difference = float(share)
    difference = ranks.broadcast_object(difference)
    dtype = inner_model(model).dtype
    if not difference <= TOLERANCE[dtype]:
        raise ExportError(
            f"the gathered weights answer otherwise than the cut ones: logits differ by {difference:.3g} "
            f"of the largest, allowed is {TOLERANCE[dtype]:g}",
            who="export",
            fix="nothing was written; export the last checkpoint with posttune export, and report this",
        )
