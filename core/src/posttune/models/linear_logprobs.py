"""Log-probabilities straight from hidden states, a piece of the vocabulary's logits at a time.

The logits of 32,768 tokens over 152,064 words are 20 GB in float32, and a loss on them keeps several
such tensors. Here the forward pass makes the logits of some rows, keeps two numbers of each, and the
backward pass makes them again for some columns. The projection is so computed once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MIB_ELEMENTS = 2**20 // 4  # float32 numbers in a MiB


@dataclass(frozen=True)
class Shape:
    """What a model does to its logits: ``softcap * tanh(logits * scale / softcap)``, and the temperature."""

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None

    def apply(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Of the projection's output: the scaled logits, and those with the temperature. May write on it."""
        plain = raw if self.scale == 1.0 else raw.mul_(self.scale)
        if self.softcap is not None:
            plain = torch.tanh_(plain.div_(self.softcap)).mul_(self.softcap)
        return plain, plain if self.temperature == 1.0 else plain / self.temperature

    def chain(self, grad: Tensor, plain: Tensor) -> Tensor:
        """From the gradient of what the softmax sees to that of the projection's output. Writes on it."""
        if self.softcap is not None:
            grad = grad.mul_(1 - (plain / self.softcap).square_())
        factor = self.scale / self.temperature
        return grad if factor == 1.0 else grad.mul_(factor)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    shape: Shape | None = None,
    entropy: bool = False,
    piece: int = 256 * MIB_ELEMENTS,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each of N targets under softmax(shape(hidden @ weight.T + bias)).

    ``hidden`` [N, H], ``weight`` [V, H], ``targets`` int64 [N], ``bias`` [V]. ``piece``: logits that exist
    at a time. Returns logp [N] and, where asked for, the entropy [N] in nats, float32 or wider. Both can
    be differentiated once, for hidden, weight and bias.
    """
    if not len(hidden):
        nothing = (hidden.sum(-1) + weight.sum() * 0).to(_wide(hidden.dtype))  # keeps the graph whole
        return nothing, nothing if entropy else None
    apply: Any = _LinearLogprobs.apply
    logp, spread = apply(hidden, weight, bias, targets, shape or Shape(), entropy, max(1, piece))
    return logp, spread if entropy else None


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        shape: Shape,
        entropy: bool,
        piece: int,
    ) -> tuple[Tensor, Tensor]:
        wide = _wide(hidden.dtype)
        logp, lse = (torch.empty(len(hidden), dtype=wide, device=hidden.device) for _ in range(2))
        spread = torch.empty_like(logp) if entropy else logp.new_empty(0)
        rows = max(1, piece // len(weight))
        for start in range(0, len(hidden), rows):
            at = slice(start, start + rows)
            _, seen = shape.apply(_project(hidden[at], weight, bias, wide))
            lse[at] = torch.logsumexp(seen, -1)
            logp[at] = seen.gather(-1, targets[at, None]).squeeze(-1) - lse[at]
            if entropy:
                spread[at] = _entropy(seen, lse[at])
        ctx.save_for_backward(hidden, weight, bias, targets, lse, spread)
        ctx.shape, ctx.piece = shape, piece
        ctx.set_materialize_grads(False)
        return logp, spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor | None, grad_spread: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, targets, lse, spread = ctx.saved_tensors
        grad_spread = grad_spread if len(spread) else None
        if grad_logp is None and grad_spread is None:
            return (None,) * 7
        wanted = ctx.needs_input_grad
        wide = lse.dtype
        grad_hidden = torch.zeros(hidden.shape, dtype=wide, device=hidden.device) if wanted[0] else None
        grad_weight = torch.empty_like(weight) if wanted[1] else None
        grad_bias = torch.empty_like(bias) if wanted[2] else None
        columns = max(1, ctx.piece // len(hidden))
        for start in range(0, len(weight), columns):
            part = slice(start, start + columns)
            own = None if bias is None else bias[part]
            plain, seen = ctx.shape.apply(_project(hidden, weight[part], own, wide))
            grad = _grad_of_seen(seen, lse, spread, grad_logp, grad_spread)
            if grad_logp is not None:
                _add_at_targets(grad, targets - start, grad_logp)
            grad = ctx.shape.chain(grad, plain).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden += grad @ weight[part]
            if grad_weight is not None:
                grad_weight[part] = grad.T @ hidden
            if grad_bias is not None:
                grad_bias[part] = grad.sum(0)
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _grad_of_seen(
    seen: Tensor, lse: Tensor, spread: Tensor, grad_logp: Tensor | None, grad_spread: Tensor | None
) -> Tensor:
    """Gradient of some columns but for the target's own: -p (g + g_entropy (log p + entropy))."""
    logp = seen - lse[:, None]
    if grad_spread is None:
        assert grad_logp is not None
        return logp.exp_().mul_(-grad_logp[:, None])
    probability = logp.exp()
    logp = logp.clamp_(min=torch.finfo(logp.dtype).min).add_(spread[:, None]).mul_(grad_spread[:, None])
    if grad_logp is not None:
        logp += grad_logp[:, None]
    return probability.mul_(logp).neg_()


def _add_at_targets(grad: Tensor, places: Tensor, grad_logp: Tensor) -> None:
    """Add the gradient of each row's target where it lies among these columns."""
    inside = (places >= 0) & (places < grad.shape[1])
    values = torch.where(inside, grad_logp, 0.0).to(grad.dtype)
    grad.scatter_add_(1, places.clamp(0, grad.shape[1] - 1)[:, None], values[:, None])


def _entropy(seen: Tensor, lse: Tensor) -> Tensor:
    """lse - sum p z. A logit of minus infinity, a token that cannot be drawn, adds nothing."""
    finite = seen.clamp(min=torch.finfo(seen.dtype).min)
    probability = (seen - lse[:, None]).exp_()
    return lse - torch.einsum("rv,rv->r", probability, finite)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _project(hidden: Tensor, weight: Tensor, bias: Tensor | None, wide: torch.dtype) -> Tensor:
    """Logits in ``wide``, rounded to the model's type in between as the model itself does it.

    A tensor of its own: what is done to it afterwards is done in place.
    """
    return torch.nn.functional.linear(hidden, weight, bias).to(wide)
