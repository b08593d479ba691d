"""Reward models and critics: a language model with a fresh head, or one of their kind trained further."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from posttune.checkpoint.sources import open_source
from posttune.config.models import ModelConfig
from posttune.models.heads import add_head, check_scalar, choose_padding
from posttune.models.hf_folder import attention_name, is_classifier
from posttune.models.load import LoadedModel, check_vocabulary, load_model, prepare
from posttune.models.tokenizer import load_tokenizer
from posttune.models.values import check_packing


def load_reward_model(
    config: ModelConfig,
    path: Path | None,
    *,
    seed: int,
    device: str | torch.device = "cpu",
    move: bool = True,
) -> LoadedModel:
    """A sequence-classification model with one label, from a language model or from a reward model.

    ``path`` is a folder, a checkpoint or a run folder, as for `load_model`; of a language model the
    head is new and drawn with ``seed``. The padding token becomes one that can end no sequence: see
    `choose_padding`. Raises `ModelError` and `CheckpointError`.
    """
    loaded = _load(config, path, seed, device, std=None, move=move)
    choose_padding(loaded.tokenizer, loaded.model.config)
    return loaded


def load_critic(
    config: ModelConfig,
    path: Path | None,
    *,
    seed: int,
    device: str | torch.device = "cpu",
    move: bool = True,
) -> LoadedModel:
    """A model whose head gives the value of every token; from a language model its first values are 0.

    From a reward model (a folder, a checkpoint) the head is kept. Raises as `load_reward_model`.
    """
    return _load(config, path, seed, device, std=0.0, move=move)


def _load(
    config: ModelConfig,
    path: Path | None,
    seed: int,
    device: str | torch.device,
    std: float | None,
    *,
    move: bool,
) -> LoadedModel:
    who = f"model {path}" if path is not None else "model.init"
    if path is not None and is_classifier(open_source(path).config):
        loaded = _load_trained(config, path, device, move=move)
    else:
        bare = config.model_copy(update={"lora": None, "gradient_checkpointing": False})
        loaded = load_model(bare, path, seed=seed, device=device, move=move)
        loaded = replace(loaded, model=add_head(loaded.model, who=who, seed=seed, std=std), tied=False)
    check_scalar(loaded.model, who=who)
    check_packing(loaded.model, who=who)
    return replace(loaded, model=prepare(loaded.model, config, seed))


def _load_trained(config: ModelConfig, path: Path, device: str | torch.device, *, move: bool) -> LoadedModel:
    opened = open_source(path)
    dtype = cast(torch.dtype, getattr(torch, config.dtype))
    attention = attention_name(config.attention, dtype=dtype, device=torch.device(device))
    model = opened.load_merged(dtype=dtype, attention=attention)
    tokenizer = load_tokenizer(config.tokenizer or opened.tokenizer_dir)
    check_vocabulary(model.config, tokenizer)
    if move:
        cast(torch.nn.Module, model).to(device)
    return LoadedModel(model, tokenizer, opened.path, opened.dtype, tied=False)
