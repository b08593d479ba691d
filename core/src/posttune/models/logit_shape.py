"""What a model does to its logits after the vocabulary projection: found out by trying it.

Some scale them (Cohere, Granite), some cap them softly (Gemma). Rather than to know the name of every
such option, the head is made to give back known numbers, and what becomes of these is looked at.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from posttune.models.linear_logprobs import Shape

_PROBE = (0.0, 2.0**-10, -(2.0**-10), 0.5, -0.5, 3.0, -3.0, 17.0, -17.0, 80.0, 1e6, -1e6)
_TOLERANCE = 1e-4  # some models compute it in float32
log = logging.getLogger("posttune.models")


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let ``module`` compute something else. Its hooks run as always."""
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]


@torch.no_grad()
def find_shape(model: nn.Module, head: nn.Module) -> Shape | None:
    """The scale and the soft cap of the model's logits; None where it does something else to them.

    Passes two tokens through the model, in eval mode.
    """
    device = next(model.parameters()).device
    numbers = torch.tensor(_PROBE, dtype=torch.float64, device=device)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    positions = torch.tensor([[0, 1]], device=device)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with replaced_forward(head, lambda hidden: numbers.expand(1, hidden.shape[1], -1)):
            seen = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    finally:
        for module, training in modes:
            module.training = training
    found = fit(numbers.tolist(), seen[0, 0].double().tolist()) if seen.shape[-1] == len(_PROBE) else None
    if found is None:
        log.warning("the logits of %s are not made in pieces: it changes them in its own way", _name(model))
    return found


def fit(given: list[float], seen: list[float]) -> Shape | None:
    """The shape that makes ``seen`` of ``given``, numbers of `_PROBE`."""
    scale = seen[1] / given[1]
    if _close(seen, [scale * number for number in given]):
        return Shape(scale=scale)
    cap = abs(seen[-1])
    if not (math.isfinite(cap) and abs(seen[1]) < cap):
        return None
    scale = cap * math.atanh(seen[1] / cap) / given[1]
    if _close(seen, [cap * math.tanh(scale * number / cap) for number in given]):
        return Shape(scale=scale, softcap=cap)
    return None


def _close(left: list[float], right: list[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=1e-9) for a, b in zip(left, right, strict=True))


def _name(model: nn.Module) -> str:
    return type(model).__name__
