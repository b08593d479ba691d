"""AdamW, and the step that ends a batch: sum over ranks, clip, move."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from posttune.config.models import OptimizerConfig
from posttune.distributed.ranks import Ranks
from posttune.errors import ModelError


def make_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; vectors (norms, biases) are not decayed.

    The fused kernel is used wherever torch has one: on two CPU cores it took a quarter of the time of
    the other two at 0.6 M parameters and a sixth at 10 M.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    if not params:
        raise ModelError(
            "the model has no parameter to train", fix="check which modules lora.target_modules names"
        )
    groups = [
        {"params": [param for param in params if param.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]
    beta1, beta2 = config.betas
    fused = {param.device.type for param in params} <= {"cpu", "cuda"}
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(beta1, beta2),
        eps=config.eps,
        fused=fused,
    )


class Stepper:
    """Ends a batch: gradients of all ranks are summed, clipped by their global norm, and applied.

    A gradient that is not finite moves nothing: the step is skipped and counted. ``in_a_row`` counts
    the skipped steps since the last one that was taken.
    """

    def __init__(self, optimizer: torch.optim.AdamW, grad_clip: float, ranks: Ranks) -> None:
        self.optimizer = optimizer
        self.grad_clip = grad_clip
        self.ranks = ranks
        self.in_a_row = 0

    @property
    def params(self) -> list[torch.nn.Parameter]:
        """What is trained."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def step(self, lr: float, loss: float) -> float:
        """Take one step at ``lr``; returns the gradient's global norm before clipping.

        ``loss`` is the batch's loss over all ranks; like the norm it must be finite.
        """
        params = self.params
        _fill_missing(params)
        self.ranks.sum_grads(params)
        norm = torch.nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
        grad_norm = float(norm)
        if math.isfinite(grad_norm) and math.isfinite(loss):
            self._move(params, norm, lr)
            self.in_a_row = 0
        else:
            self.in_a_row += 1
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm

    def _move(self, params: list[torch.nn.Parameter], norm: torch.Tensor, lr: float) -> None:
        if self.grad_clip > 0:
            torch.nn.utils.clip_grads_with_norm_(params, self.grad_clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()


def _fill_missing(params: Iterable[torch.nn.Parameter]) -> None:
    """A rank whose share was empty has no gradients; the sum over ranks needs the same ones everywhere."""
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
