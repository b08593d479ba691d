"""The models of a checkpoint: the one that it is of, and others beside it, such as PPO's critic.

Tensors of a part called ``critic`` are named ``part/critic/model/...`` and ``part/critic/optimizer/...``;
those of the main model, whose name is empty, have no such beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from posttune.checkpoint import training_state
from posttune.errors import CheckpointError
from posttune.models.lora import describe

Tensors = dict[str, torch.Tensor]
MAIN = ""


@dataclass(frozen=True)
class Part:
    """A model and its optimiser. ``base``: the folder whose weights its adapters belong to."""

    model: nn.Module
    optimizer: Optimizer | None = None
    base: Path | None = None

    @property
    def adapters_only(self) -> bool:
        """Whether a checkpoint keeps its adapters alone, and where the rest lies."""
        return self.base is not None and describe(self.model) is not None

    def tensors(self) -> Tensors:
        """Weights and optimiser state: the module's own storage, not copies."""
        found = training_state.model_tensors(self.model, adapters_only=self.adapters_only)
        if self.optimizer is not None:
            found |= training_state.optimizer_tensors(self.model, self.optimizer)
        return found

    def settings(self) -> dict[str, Any] | None:
        """What the optimiser keeps that is no tensor; None without one."""
        if self.optimizer is None:
            return None
        return training_state.optimizer_settings(self.model, self.optimizer)


@dataclass(frozen=True)
class Described:
    """What a checkpoint says of one of its models."""

    dtype: str  # of the weights
    lora: dict[str, Any] | None  # rank, alpha, dropout, target_modules
    base: dict[str, str] | None  # path, relative path, fingerprint; None: all weights are in the checkpoint


def tensors_of(parts: Mapping[str, Part]) -> Tensors:
    """The tensors of all parts under the names that a checkpoint gives them."""
    return {
        start_of(name) + key: value for name, part in parts.items() for key, value in part.tensors().items()
    }


def weights_to_fill(
    who: str, described: Described, model: nn.Module, stored: training_state.Shapes, *, types: bool
) -> Tensors:
    """The model's own tensors that a checkpoint fills. Raises `CheckpointError` naming what differs."""
    now = describe(model)
    if described.lora != now:
        raise CheckpointError(
            f"its adapters are {described.lora}, the model's are {now}",
            who=who,
            fix="resume with the same lora settings",
        )
    wanted = training_state.model_tensors(model, adapters_only=described.base is not None)
    training_state.check_model(who, wanted, stored, types=types)
    return wanted


@dataclass(frozen=True)
class Filling:
    """Takes one model and its optimiser back from a checkpoint: first the tensors are read, then `finish`."""

    part: Part
    tensors: Tensors  # to be read into, under the checkpoint's names
    state: Tensors  # those of the optimiser among them, under its own names
    settings: Mapping[str, Any]

    def finish(self) -> None:
        """Give the optimiser what was read."""
        if self.part.optimizer is not None:
            training_state.restore_optimizer(self.part.model, self.part.optimizer, self.state, self.settings)


def prepare_filling(
    who: str,
    name: str,
    part: Part,
    described: Described,
    settings: Mapping[str, Any] | None,
    stored: training_state.Shapes,
) -> Filling:
    """Compare what is stored with what is there. Raises `CheckpointError`; nothing has changed by then."""
    start = start_of(name)
    mine = {key.removeprefix(start): shape for key, shape in stored.items() if key.startswith(start)}
    tensors = weights_to_fill(who, described, part.model, mine, types=True)
    state: Tensors = {}
    if part.optimizer is not None:
        if settings is None:
            fix = "start a new run from it instead of resuming"
            raise CheckpointError("holds no optimiser", who=who, fix=fix)
        training_state.check_optimizer(who, part.model, part.optimizer, settings)
        state = training_state.empty_optimizer_tensors(part.model, part.optimizer, mine)
    named = {start + key: value for key, value in {**tensors, **state}.items()}
    return Filling(part, named, state, settings or {})


def check_names(who: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` where the models beside the main one are not those of the trainer."""
    if found.keys() == wanted.keys():
        return
    there, here = (", ".join(sorted(names.keys() - {MAIN})) or "none" for names in (found, wanted))
    raise CheckpointError(
        f"the models beside the main one differ: it holds {there}, the stage has {here}",
        who=who,
        fix="resume with the configuration that it was written with",
    )


def start_of(name: str) -> str:
    """How the names of a part's tensors begin."""
    return f"part/{name}/" if name else ""
