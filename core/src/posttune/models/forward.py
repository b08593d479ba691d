"""Log-probabilities of response tokens under a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from posttune.loss.entropy import entropy as entropy_of
from posttune.memory.activations import saving
from posttune.models.linear_logprobs import MIB_ELEMENTS, Shape, linear_logprobs
from posttune.models.logit_shape import find_shape, replaced_forward
from posttune.models.lora import inner_model

if TYPE_CHECKING:
    from posttune.data.packing import ModelBatch

LOGITS_MIB = 256
_LIMITS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_SHAPES: WeakKeyDictionary[nn.Module, Shape | None] = WeakKeyDictionary()


@dataclass(frozen=True)
class ForwardOut:
    """Of each of the N response tokens: its log-probability, and the entropy of its distribution (nats)."""

    logp: torch.Tensor  # float32 [N]
    entropy: torch.Tensor | None  # float32 [N]


def limit_logits(model: nn.Module, mib: int) -> None:
    """Let at most ``mib`` MiB of the model's logits, as float32, exist at a time."""
    _LIMITS[inner_model(model)] = mib * MIB_ELEMENTS


def response_logprobs(
    model: nn.Module, batch: ModelBatch, *, temperature: float, entropy: bool = False
) -> ForwardOut:
    """Log-probabilities of ``batch.targets`` under softmax(logits / temperature), in float32 or wider.

    The vocabulary projection is computed for the N predicting positions alone, and piece by piece where
    its output is larger than `limit_logits` allows. The batch needs no attention mask: transformers keeps
    packed sequences apart by their restarting positions. Gradients flow unless the caller disables them.
    Raises ValueError unless temperature > 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0 to have log-probabilities, got {temperature}")
    inner = inner_model(model)
    head = inner.get_output_embeddings()
    limit = _LIMITS.get(inner, LOGITS_MIB * MIB_ELEMENTS)
    if isinstance(head, nn.Linear) and len(batch.targets) * head.out_features > limit:
        shape = look_at_logits(model)
        if shape is not None:
            seen = Shape(temperature, shape.scale, shape.softcap)
            return _in_pieces(model, head, batch, seen, entropy=entropy, limit=limit)
    logits = _logits_at(model, head, batch)  # [N, V]
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logp = -functional.cross_entropy(scaled, batch.targets, reduction="none")  # [N]
    return ForwardOut(logp=logp, entropy=entropy_of(scaled) if entropy else None)


def look_at_logits(model: nn.Module) -> Shape | None:
    """What the model does to its logits, found out once; None where it is nothing that is known here."""
    inner = inner_model(model)
    if inner not in _SHAPES:
        head = inner.get_output_embeddings()
        _SHAPES[inner] = find_shape(model, head) if isinstance(head, nn.Linear) else None
    return _SHAPES[inner]


def _in_pieces(
    model: nn.Module, head: nn.Linear, batch: ModelBatch, shape: Shape, *, entropy: bool, limit: int
) -> ForwardOut:
    """The projection and its softmax in the place of the head, while the model runs.

    There the head's weights are whole even when they are sharded between its calls. What the head gives
    back is a zero that depends on its input, so that the model's own output is part of the graph.
    """
    found: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        chosen = hidden.flatten(0, 1).index_select(0, batch.predict)  # [N, H]
        weight, bias = _whole(head.weight), None if head.bias is None else _whole(head.bias)
        found.append(
            linear_logprobs(chosen, weight, batch.targets, bias, shape=shape, entropy=entropy, piece=limit)
        )
        return chosen[None, :1, :1] * 0  # [1, 1, 1]

    with saving(model), replaced_forward(head, forward):
        rest = model(**_inputs(batch)).logits
    logp, spread = found[0]
    return ForwardOut(logp + rest.to(logp.dtype).sum(), spread)


def _whole(weight: torch.Tensor) -> torch.Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _inputs(batch: ModelBatch) -> dict[str, Any]:
    return {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False}


def _logits_at(model: nn.Module, head: nn.Module | None, batch: ModelBatch) -> torch.Tensor:
    if head is None:
        with saving(model):
            logits: torch.Tensor = model(**_inputs(batch)).logits  # [R, T, V]
        return logits.flatten(0, 1).index_select(0, batch.predict)
    with saving(model), _projecting_only(head, batch.predict):
        logits = model(**_inputs(batch)).logits  # [1, N, V]
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
