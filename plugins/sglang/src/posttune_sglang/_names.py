"""The weights that SGLang computes with, under the names and in the shapes of the Hugging Face files."""

from __future__ import annotations

from posttune.engines.held import held_checksums, held_tensors
from torch import nn

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def checksums(model: nn.Module) -> dict[str, str]:
    """SHA-256 of each tensor by Hugging Face name, fused ones split."""
    return held_checksums(held_tensors(model, FUSED))
