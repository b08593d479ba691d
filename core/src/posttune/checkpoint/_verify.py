"""Reading an export back: the same tensors, bit for bit, and the same logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from posttune.checkpoint._export import export_tensor, rows_as_configured
from posttune.checkpoint.sources import HFFolder, LiveModel, ModelSource
from posttune.errors import ExportError
from posttune.models.hf_folder import is_classifier, read_model
from posttune.models.lora import inner_model, is_lora
from posttune.models.params import embeddings_tied
from posttune.models.tokenizer import PROBE, difference, load_tokenizer
from posttune.types import Verification

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Largest difference of a logit, as a share of the largest logit, by the coarsest type in play."""
_FLOOR = 1e-5
_ROWS, _LENGTH = 2, 48


def verify_model(source: ModelSource, folder: Path) -> Verification:
    """Load ``folder`` with transformers and compare its logits with the source's on fixed tokens.

    A model on disk is computed in float32 on both sides; the trainer's own module in its own type, on
    its device. Raises `ExportError` where a tensor or the tokenizer is not what was to be written.
    """
    _compare_tensors(source, folder)
    live = isinstance(source, LiveModel)
    trained = source.load_model() if live else source.load_model(dtype=torch.float32)
    compute, lossy = inner_model(trained).dtype, is_lora(trained)
    ids = probe(source)
    attention = inner_model(trained).config._attn_implementation
    expected, tied = logits_of(trained, ids), embeddings_tied(trained)
    device = inner_model(trained).device
    del trained
    written = read_model(folder, dtype=compute, attention=attention)
    stored = HFFolder(folder).dtype
    if embeddings_tied(written) != tied:
        raise differs(folder, f"its embeddings are {'' if tied else 'not '}tied in the source")
    check_tokenizer(source, folder)
    found = logits_of(torch.nn.Module.to(written, device), ids)
    expected = expected[..., : found.shape[-1]]  # without padding of the vocabulary
    lossy = lossy or torch.promote_types(stored, source.dtype) != stored
    coarsest = [compute, *([stored] if lossy else [])]
    share = max(TOLERANCE[dtype] for dtype in coarsest)
    return Verification(
        max_abs_logit_difference=(found - expected).abs().max().item(),
        tolerance=max(_FLOOR, share * expected.abs().max().item()),
        checked_tokens=ids.numel(),
    )


def differs(folder: Path, what: str) -> ExportError:
    """What is raised where what was read back is not what was to be written."""
    return ExportError(
        f"what was read back differs: {what}", who=str(folder), fix="nothing was kept; try again"
    )


def probe(source: ModelSource) -> torch.Tensor:
    """Token ids, int64 [2, 48]: a text, then ids drawn from the whole vocabulary with a fixed seed."""
    config = source.config.get_text_config()
    length = min(_LENGTH, getattr(config, "max_position_embeddings", None) or _LENGTH)
    ids = torch.randint(config.vocab_size, (_ROWS, length), generator=torch.Generator().manual_seed(0))
    text = source.tokenizer(PROBE, add_special_tokens=False)["input_ids"][:length]
    ids[0, : len(text)] = torch.tensor(text)
    return ids


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Float32 logits on the CPU, in eval mode; the model is as before afterwards.

    A sequence classifier is asked about one sequence at a time: it may have no padding token.
    """
    training = model.training
    model.eval()
    parts = ids.to(model.device).split(1 if is_classifier(inner_model(model).config) else len(ids))
    try:
        logits = torch.cat([model(input_ids=part, use_cache=False).logits for part in parts])
    finally:
        model.train(training)
    return logits.float().cpu()


def _compare_tensors(source: ModelSource, folder: Path) -> None:
    stored = dict(_stored(folder))
    for name, tensor in rows_as_configured(source, source.tensors()):
        path = stored.pop(name, None)
        if path is None:
            raise differs(folder, f"{name} is not in it")
        with safe_open(path, framework="pt") as file:
            written = file.get_tensor(name)
        if not same_bits(written, export_tensor(tensor, written.dtype)):
            raise differs(folder, f"{name} holds other values")
    if stored:
        raise differs(folder, f"{next(iter(stored))} is not in the source")


def _stored(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = file.keys()
        yield from ((name, path) for name in names)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """NaN equals NaN here: that the model is broken is for the logits to say."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def check_tokenizer(source: ModelSource, folder: Path) -> None:
    """Raise `ExportError` where the folder's tokenizer is another."""
    what = difference(source.tokenizer, load_tokenizer(folder))
    if what:
        raise differs(folder, f"its tokenizer has another {what}")
