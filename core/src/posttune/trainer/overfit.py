"""Whether a few rows can be learnt by heart: the cheapest proof that masks, ids and labels fit together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from posttune.config.models import ModelConfig
from posttune.data.dataset import SampleDataset
from posttune.data.packing import TokenSequence, collate, plan
from posttune.data.records import RowError
from posttune.data.retokenize import record_of
from posttune.data.templates import resolve_template
from posttune.data.tokenize import Encoder, token_view
from posttune.errors import DataError
from posttune.models.forward import response_logprobs
from posttune.models.load import LoadedModel, load_model

ROWS = 8
LENGTH = 256  # tokens of a row at most
FALL = 0.95  # what is left of the first loss, at most, where learning works
_NEW = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_LR_NEW, _LR_LOADED = 1e-2, 5e-5


@dataclass(frozen=True)
class Overfit:
    """What became of the loss: before each step and after the last, nats a token."""

    rows: int
    tokens: int  # that are trained
    losses: list[float]
    falls: bool
    verdict: str


def overfit(dataset: SampleDataset, *, steps: int, model: str | Path | None = None, seed: int = 0) -> Overfit:
    """Train ``steps`` steps of AdamW on the first few rows, cut on the left to a short length.

    ``model`` is a folder; without one a tiny new model is made with the dataset's tokenizer (bytes, where
    it has none). Raises `DataError` where no row can be trained.
    """
    loaded = _load(dataset, model, seed)
    sequences = _sequences(dataset, loaded)
    plans = plan([len(sequence.ids) for sequence in sequences], micro_batch_tokens=ROWS * LENGTH)
    batches = [collate(sequences, micro) for micro in plans]
    tokens = sum(int(batch.packed.mask.sum()) for batch in batches)
    weights = [weight for weight in loaded.model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=_LR_NEW if model is None else _LR_LOADED, weight_decay=0.0)
    losses = []
    for step in range(steps + 1):
        optimizer.zero_grad()
        loss = 0.0
        for batch in batches:
            logp = response_logprobs(loaded.model, batch, temperature=1.0).logp
            part = -torch.where(batch.packed.mask, logp, torch.zeros_like(logp)).sum() / tokens
            loss += part.item()
            if step < steps:
                part.backward()
        losses.append(round(loss, 6) if math.isfinite(loss) else loss)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
    falls, verdict = judge(losses)
    return Overfit(len(sequences), tokens, losses, falls, verdict)


def judge(losses: Sequence[float]) -> tuple[bool, str]:
    """Whether a loss fell as it should on rows that were trained again and again, and a sentence on it."""
    first, last = losses[0], losses[-1]
    course = f"from {first:.3f} to {last:.3f} nats a token in {len(losses) - 1} steps"
    if not all(map(math.isfinite, losses)):
        return False, "the loss is not finite: check the weights and their type"
    if first < 0.05:
        return True, f"the loss is next to nothing from the start ({course}): the model knows these rows"
    if last > first * FALL:
        return False, f"the loss does not fall ({course}): check what is trained, and the tokenizer"
    return True, f"the loss falls as it should, {course}"


def _load(dataset: SampleDataset, model: str | Path | None, seed: int) -> LoadedModel:
    if model is not None:
        return load_model(ModelConfig(), Path(model), seed=seed)
    tokenizer = str(dataset.folder) if dataset.is_tokenized else "bytes"
    return load_model(ModelConfig(init=_NEW, tokenizer=tokenizer), None, seed=seed)


def _sequences(dataset: SampleDataset, loaded: LoadedModel) -> list[TokenSequence]:
    """The first rows that have something to train."""
    recorded = dataset.meta["template"]["choice"]
    template = resolve_template(recorded if recorded in ("auto", "none") else "auto", loaded.tokenizer)
    encoder = Encoder(loaded.tokenizer, template, LENGTH, "left")
    found: list[TokenSequence] = []
    for index in range(len(dataset)):
        (encoded,) = encoder.encode([token_view(record_of(dataset, index))])
        if not isinstance(encoded, RowError) and any(encoded.loss_mask):
            found.append(TokenSequence.from_mask(encoded.input_ids, encoded.loss_mask))
        if len(found) == ROWS:
            break
    if not found:
        what = "no row has a response to train"
        raise DataError(what, who=str(dataset.folder), fix="map one: --map response=COLUMN")
    return found
