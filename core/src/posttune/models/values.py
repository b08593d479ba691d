"""Scalars of a model with a head: of every response token for a critic, of a whole sequence for a reward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from posttune.errors import ModelError
from posttune.memory.activations import saving
from posttune.models.attention import where_it_lies
from posttune.models.heads import check_scalar
from posttune.models.lora import inner_model

if TYPE_CHECKING:
    from posttune.data.packing import ModelBatch

_PROBE = ((5, 6, 7, 8), (9, 4, 7, 8))  # two beginnings; the last two tokens begin another sequence
_LEAK = 0.05  # of the largest hidden value; rounding in bfloat16 is a tenth of it


def response_values(model: nn.Module, batch: ModelBatch) -> torch.Tensor:
    """Value of the state before each of the N response tokens, float32 [N].

    It is the head's scalar at ``batch.predict``: at the token before, whose logits predict this one.
    Packed as in `response_logprobs`; gradients flow unless the caller disables them.
    """
    return _scalars_at(model, batch, batch.predict)


def sequence_scores(model: nn.Module, batch: ModelBatch) -> torch.Tensor:
    """The head's scalar at the last token of each of the S sequences, float32 [S], in ``batch.order``.

    Every sequence must have a response token.
    """
    last = batch.packed.cu_seqlens[1:].long() - 1
    return _scalars_at(model, batch, batch.predict[last] + 1)


def _scalars_at(model: nn.Module, batch: ModelBatch, places: torch.Tensor) -> torch.Tensor:
    inner = inner_model(model)
    hidden = hidden_states(inner, batch.input_ids, batch.position_ids)
    return project(inner, hidden.flatten(0, 1).index_select(0, places))


def hidden_states(
    model: nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """What the head sees of every token: [R, T, H]. Packed sequences are told apart by their positions."""
    inner = inner_model(model)
    with saving(inner):
        outputs = inner.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
    hidden: torch.Tensor = outputs.last_hidden_state
    return hidden


def project(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The head in float32, so that near scores stay apart in a half-precision model: [..., H] to [...]."""
    inner = inner_model(model)
    head = check_scalar(inner, who="model")
    bias = None if head.bias is None else head.bias.float()
    return functional.linear(hidden.float(), head.weight.float(), bias).squeeze(-1)


@torch.no_grad()
def check_packing(model: nn.Module, *, who: str) -> None:
    """Raise `ModelError` where a sequence sees the one before it in its row.

    Two rows differ in their first sequence alone; the hidden states of the second must agree.
    """
    device = next(model.parameters()).device
    ids = torch.tensor(_PROBE, device=device) % inner_model(model).config.get_text_config().vocab_size
    positions = torch.tensor([[0, 1, 0, 1]] * 2, device=device)
    with where_it_lies(inner_model(model)):
        hidden = hidden_states(model, ids, positions).float()
    leak = (hidden[0, 2:] - hidden[1, 2:]).abs().max() / hidden.abs().max()
    if float(leak) > _LEAK:
        raise ModelError(
            f"{type(inner_model(model)).__name__} does not keep the sequences of a packed row apart",
            who=who,
            fix="use a decoder with attention throughout, such as llama or qwen2",
        )
