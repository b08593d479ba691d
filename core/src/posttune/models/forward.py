"""Log-probabilities of response tokens under a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from posttune.loss.entropy import entropy as entropy_of
from posttune.models.lora import inner_model

if TYPE_CHECKING:
    from posttune.data.packing import ModelBatch


@dataclass(frozen=True)
class ForwardOut:
    """Of each of the N response tokens: its log-probability, and the entropy of its distribution (nats)."""

    logp: torch.Tensor  # float32 [N]
    entropy: torch.Tensor | None  # float32 [N]


def response_logprobs(
    model: nn.Module, batch: ModelBatch, *, temperature: float, entropy: bool = False
) -> ForwardOut:
    """Log-probabilities of ``batch.targets`` under softmax(logits / temperature), in float32.

    The vocabulary projection is computed for the N predicting positions alone. The batch needs no
    attention mask: transformers keeps packed sequences apart by their restarting positions.
    Gradients flow unless the caller disables them. Raises ValueError unless temperature > 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0 to have log-probabilities, got {temperature}")
    logits = _logits_at(model, batch)  # [N, V]
    scaled = logits.float() / temperature
    logp = -functional.cross_entropy(scaled, batch.targets, reduction="none")  # [N]
    return ForwardOut(logp=logp, entropy=entropy_of(scaled) if entropy else None)


def _logits_at(model: nn.Module, batch: ModelBatch) -> torch.Tensor:
    head = inner_model(model).get_output_embeddings()
    inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False}
    if head is None:
        logits: torch.Tensor = model(**inputs).logits  # [R, T, V]
        return logits.flatten(0, 1).index_select(0, batch.predict)
    with _projecting_only(head, batch.predict):
        logits = model(**inputs).logits  # [1, N, V]
    return logits[0]


@contextmanager
def _projecting_only(head: nn.Module, positions: torch.Tensor) -> Iterator[None]:
    """Let the output embedding see the given flat positions alone.

    A hook on its input rather than a call of its own, because what a model does to its logits
    afterwards (a soft cap, a scale) must still happen.
    """

    def select(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden: torch.Tensor = args[0]  # [R, T, H]
        return (hidden.flatten(0, 1).index_select(0, positions)[None], *args[1:])

    handle = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()
