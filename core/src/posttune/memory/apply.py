"""Gives a stage's models and optimisers what its ``memory`` section says."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from posttune.config.models import MemoryConfig, RlStage
from posttune.errors import UserError
from posttune.memory.activations import keep_on_host
from posttune.memory.ledger import LEDGER
from posttune.memory.residence import lodge, lodge_optimizer
from posttune.models.forward import limit_logits, look_at_logits
from posttune.types import BackendInfo


def apply_memory(model: nn.Module, config: MemoryConfig, *, cut: bool = False) -> None:
    """Limit the model's logits and place its activations. A model that will be ``cut`` is tried now.

    Later the trial would take all processes at once. Raises `UserError` for activations that are to wait on
    the host where weights are gathered for each layer: these could not be told from activations.
    """
    if cut and config.activations == "host":
        fix = "leave it out, or set parallel.data_shard and parallel.tensor to 1"
        raise UserError("it does not go with weights that are cut", who="memory.activations", fix=fix)
    limit_logits(model, config.logits_mib)
    if cut:
        look_at_logits(model)
    if config.activations == "host":
        keep_on_host(model)


def settle_in(name: str, model: nn.Module, config: MemoryConfig, device: torch.device) -> None:
    """Count the model as ``name``, and let it wait in the host's memory where it is to."""
    LEDGER.watch(name, model)
    if name in config.offload:
        lodge(model, device)


def settle_optimizer(
    name: str, model: nn.Module, optimizer: Optimizer, config: MemoryConfig, device: torch.device
) -> None:
    """Count the optimiser with the model ``name``, and let its moments wait where they are to."""
    LEDGER.watch(name, model, optimizer)
    if "optimizer" in config.offload:
        lodge_optimizer(optimizer, device)


def check_idle(stage: RlStage, engine: BackendInfo) -> None:
    """Raise `UserError` where the policy is to wait on the host, and the engine computes with its weights."""
    if "policy" in stage.memory.offload and engine.shares_weights:
        what = f"the policy is never idle: the rollout backend {engine.name} computes with its weights"
        raise UserError(what, who="memory.offload", fix="take policy out, or choose another backend")
