"""Scoring texts with a sequence-classification model of transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from posttune.checkpoint.sources import OnDisk, open_source
from posttune.data.conversation import parse_messages
from posttune.data.encoded import Encoded
from posttune.data.records import RowError
from posttune.data.templates import resolve_template
from posttune.data.tokenize import Encoder
from posttune.errors import DataError, ModelError, UserError
from posttune.models.heads import find_head
from posttune.models.hf_folder import attention_name, is_classifier
from posttune.models.tokenizer import has_tokenizer, load_tokenizer
from posttune.models.values import hidden_states, project
from posttune.reward.model import ModelRewardConfig
from posttune.types import Sample

WHO = "reward 'model'"


def check(config: ModelRewardConfig) -> OnDisk:
    """Open the folder. Raises `ModelError` where it holds no reward model; no weights are read."""
    _device(config.device)
    source = open_source(Path(config.path).expanduser())
    who = f"{WHO}, path {config.path}"
    if not is_classifier(source.config):
        found = ", ".join(source.config.architectures or ["nothing named"])
        raise ModelError(
            f"is no sequence-classification model (its architecture: {found})",
            who=who,
            fix="train a reward model with a reward_model stage, or name the folder of one",
        )
    if source.config.num_labels != 1:
        names = ", ".join(map(str, list((source.config.id2label or {}).values())[:5]))
        raise ModelError(
            f"it has {source.config.num_labels} labels ({names}); a reward model has one",
            who=who,
            fix="name a reward model; a classifier's labels can be scored by a function reward",
        )
    if not has_tokenizer(source.tokenizer_dir):
        raise ModelError(
            "the folder holds no tokenizer", who=who, fix="copy the reward model's tokenizer into it"
        )
    return source


@dataclass(frozen=True)
class Scorer:
    """A reward model that is loaded."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    join: Joiner
    batch_size: int

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> list[float]:
        """One number a sample, in order. Raises `DataError` for an answer that cannot be tokenised."""
        ids = self.join(samples)
        scores = [0.0] * len(samples)
        by_length = sorted(range(len(ids)), key=lambda place: len(ids[place]))  # little padding
        for start in range(0, len(ids), self.batch_size):
            places = by_length[start : start + self.batch_size]
            found = self._batch([ids[place] for place in places]).tolist()
            for place, value in zip(places, found, strict=True):
                scores[place] = self._finite(value, samples[place])
        return scores

    def _batch(self, ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """float32 [S]. Padding is on the right, where nothing of a decoder sees it."""
        padding = self.model.config.get_text_config().pad_token_id or 0
        lengths = torch.tensor([len(each) for each in ids])
        padded = torch.full((len(ids), int(lengths.max())), padding)
        for number, each in enumerate(ids):
            padded[number, : len(each)] = torch.tensor(each)
        padded = padded.to(self.model.device)
        if find_head(self.model) is not None:
            hidden = hidden_states(self.model, padded)
            last = hidden[torch.arange(len(ids), device=hidden.device), lengths.to(hidden.device) - 1]
            return project(self.model, last)
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        logits: torch.Tensor = self.model(
            input_ids=padded, attention_mask=mask.long().to(padded.device)
        ).logits
        return logits[:, 0].float()

    def _finite(self, value: float, sample: Sample) -> float:
        if not math.isfinite(value):
            raise ModelError(
                f"the score of sample {sample.name} is {value}",
                who=WHO,
                fix="set options.dtype to float32; if that fails too, the reward model's weights are broken",
            )
        return value


def load_scorer(config: ModelRewardConfig) -> Scorer:
    """Load the model on its device, and what its tokenizer says of how texts are joined."""
    source = check(config)
    device = _device(config.device)
    dtype = source.dtype if config.dtype == "auto" else cast(torch.dtype, getattr(torch, config.dtype))
    model = source.load_merged(dtype=dtype, attention=attention_name("auto", dtype=dtype, device=device))
    cast(nn.Module, model).to(device).eval().requires_grad_(False)
    tokenizer = load_tokenizer(source.tokenizer_dir)
    limit = config.max_length or _positions(model.config)
    return Scorer(model, tokenizer, Joiner(tokenizer, config.template, limit), config.batch_size)


def _device(name: str) -> torch.device:
    """``auto`` and ``cuda`` are the GPU of this process. Raises `UserError` for one that is not there."""
    fix = "use auto, cpu or cuda"
    has_gpu = torch.cuda.is_available()
    try:
        device = torch.device(("cuda" if has_gpu else "cpu") if name == "auto" else name)
    except RuntimeError as error:
        raise UserError(f"device {name!r} is not one that torch knows", who=WHO, fix=fix) from error
    if device.type == "cuda" and not has_gpu:
        raise UserError(f"device {name!r}: torch finds no GPU", who=WHO, fix=fix)
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


def _positions(config: PretrainedConfig) -> int | None:
    positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions


class Joiner:
    """Prompt and answer as the reward model was trained to read them.

    Decoders read what `Encoder` makes of a row, as in training here. Tokenizers with a separator (BERT's
    kin) and without a chat template read two texts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str, limit: int | None) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        chosen = resolve_template(template, tokenizer)
        self._two_texts = chosen.source is None and tokenizer.sep_token is not None
        self._encoder = None if self._two_texts else Encoder(tokenizer, chosen, limit, "left")

    def __call__(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Token ids of each sample. Raises `DataError` naming the first that has none."""
        if self._encoder is None:
            return [self._as_two_texts(sample) for sample in samples]
        try:
            encoded = self._encoder.encode([_row(sample) for sample in samples])
        except DataError as error:
            raise DataError(error.what, who=WHO, fix=error.fix) from error
        return [_ids(sample, row) for sample, row in zip(samples, encoded, strict=True)]

    def _as_two_texts(self, sample: Sample) -> list[int]:
        found = self._tokenizer(
            sample.prompt,
            sample.response,
            truncation="longest_first" if self._limit else False,
            max_length=self._limit,
        )
        ids: list[int] = found["input_ids"]
        return ids


def _ids(sample: Sample, row: Encoded | RowError) -> list[int]:
    if isinstance(row, RowError):
        fix = "give the model a template that takes it: options.template"
        raise DataError(f"sample {sample.name} cannot be tokenised: {row}", who=WHO, fix=fix)
    return row.input_ids


def _row(sample: Sample) -> Mapping[str, Any]:
    """The sample as a row of data: the conversation before the answer where there is one, else the prompt."""
    messages = sample.columns.get("messages")
    if not messages:
        return {"prompt": sample.prompt, "response": sample.response}
    try:
        context = parse_messages(messages)
    except RowError as problem:
        raise DataError(
            f"sample {sample.name}: {problem}", who=WHO, fix="mend its column messages"
        ) from problem
    if context[-1]["role"] == "assistant":  # the answer of the data, in whose place this one stands
        context = context[:-1]
    return {"messages": context, "chosen": sample.response, "tools": sample.columns.get("tools")}
