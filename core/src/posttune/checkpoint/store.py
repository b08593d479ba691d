"""Checkpoints of a training run: folders ``global_step_N`` that are whole or not there.

``posttune.checkpoint.layout`` says what lies in one, ``writing`` writes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from posttune.checkpoint import dcp, rng, training_state
from posttune.checkpoint.layout import FORMAT as FORMAT
from posttune.checkpoint.layout import HF as HF
from posttune.checkpoint.layout import MARKER as MARKER
from posttune.checkpoint.layout import PARTS as PARTS
from posttune.checkpoint.layout import TENSORS as TENSORS
from posttune.checkpoint.layout import Meta as Meta
from posttune.checkpoint.layout import described as described
from posttune.checkpoint.layout import find_base as find_base
from posttune.checkpoint.layout import fingerprint as fingerprint
from posttune.checkpoint.layout import hf_files as hf_files
from posttune.checkpoint.layout import is_checkpoint as is_checkpoint
from posttune.checkpoint.layout import latest as latest
from posttune.checkpoint.layout import prune as prune
from posttune.checkpoint.layout import read_described
from posttune.checkpoint.layout import read_meta as read_meta
from posttune.checkpoint.layout import read_state as read_state
from posttune.checkpoint.layout import step_of as step_of
from posttune.checkpoint.layout import what_is_missing as what_is_missing
from posttune.checkpoint.parts import (
    MAIN,
    Described,
    Filling,
    Part,
    check_names,
    prepare_filling,
    start_of,
    weights_to_fill,
)
from posttune.checkpoint.writing import begin as begin
from posttune.distributed.ranks import Ranks


def load(
    path: Path,
    *,
    model: nn.Module,
    optimizer: Optimizer | None,
    ranks: Ranks | None = None,
    restore_rng: bool = True,
    parts: Mapping[str, Part] | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into models, optimisers and random generators; return the trainer's state.

    ``parts`` must be those that were saved. A rank that the checkpoint has no generators of keeps its
    own. Raises `CheckpointError` naming what differs before anything has changed.
    """
    folder, rank = path / TENSORS, (ranks or Ranks()).rank
    abouts = read_described(path)
    stored = dcp.shapes(folder)
    fillings = _fillings(path, {MAIN: Part(model, optimizer), **(parts or {})}, abouts, stored)
    wanted = {key: value for filling in fillings for key, value in filling.tensors.items()}
    generators = _empty_generators(stored, rank) if restore_rng else {}
    dcp.read_into(folder, {**wanted, **generators})
    for filling in fillings:
        filling.finish()
    if generators:
        rng.restore({name.rpartition("/")[2]: value for name, value in generators.items()})
    return read_state(path)


def _fillings(
    path: Path,
    parts: Mapping[str, Part],
    abouts: Mapping[str, tuple[Described, Any]],
    stored: training_state.Shapes,
) -> list[Filling]:
    who = f"checkpoint {path}"
    check_names(who, abouts, parts)
    made = []
    for name, part in parts.items():
        about, settings = abouts[name]
        find_base(path, about)
        made.append(prepare_filling(f"{who}, {name}" if name else who, name, part, about, settings, stored))
    return made


def load_weights(path: Path, model: nn.Module, part: str = MAIN) -> None:
    """Load the weights of one of a checkpoint's models alone, cast to the type of ``model``.

    Raises `CheckpointError`.
    """
    about, folder, start = described(path, part), path / TENSORS, start_of(part)
    mine = {
        name.removeprefix(start): each for name, each in dcp.shapes(folder).items() if name.startswith(start)
    }
    who = f"checkpoint {path}, {part}" if part else f"checkpoint {path}"
    wanted = weights_to_fill(who, about, model, mine, types=False)
    dcp.read_into(folder, {start + name: tensor for name, tensor in wanted.items()})


def count_weights(path: Path, part: str = MAIN) -> int:
    """Elements of the weights that a checkpoint holds of one of its models."""
    start = f"{start_of(part)}model/"
    shapes = dcp.shapes(path / TENSORS)
    return sum(math.prod(shape) for name, (shape, _) in shapes.items() if name.startswith(start))


def _empty_generators(stored: training_state.Shapes, rank: int) -> dict[str, torch.Tensor]:
    prefix = f"rng/{rank}/"
    return {
        name: torch.zeros(shape, dtype=dtype)
        for name, (shape, dtype) in stored.items()
        if name.startswith(prefix)
    }
