"""The step that ends a batch: sum over ranks, clip, move."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from posttune.config.models import OptimizerConfig
from posttune.distributed import gradients
from posttune.distributed.ranks import Ranks
from posttune.errors import UserError
from posttune.memory.ledger import LEDGER
from posttune.optim.make import make_optimizer as make_optimizer
from posttune.optim.make import set_lr
from posttune.optim.states import parameters_of
from posttune.optim.stepping import HostStates, step_all, step_one


def make_stepper(model: nn.Module, config: OptimizerConfig, ranks: Ranks) -> Stepper:
    """The stepper with the optimiser that ``config`` names. Raises `ModelError` and `UserError`."""
    optimizer = make_optimizer(model, config)
    if not config.in_backward:
        return Stepper(optimizer, config.grad_clip, ranks, offload=config.offload)
    if ranks.world > 1:
        what = f"a gradient is whole only when all {ranks.world} processes have added theirs"
        fix = "leave it out, or run one process"
        raise UserError(what, who="optimizer.in_backward", fix=fix)
    return BackwardStepper(optimizer, ranks, offload=config.offload)


class Stepper:
    """Ends a batch: gradients of all ranks are summed, clipped by their global norm, and applied.

    A gradient that is not finite moves nothing: the step is skipped and counted. ``in_a_row`` counts
    the skipped steps since the last one that was taken. With ``offload`` the moments lie in the host's
    memory.
    """

    def __init__(
        self, optimizer: Optimizer, grad_clip: float, ranks: Ranks, *, offload: bool = False
    ) -> None:
        self.optimizer = optimizer
        self.grad_clip = grad_clip
        self.ranks = ranks
        self.in_a_row = 0
        self.host = HostStates(optimizer) if offload else None

    @property
    def params(self) -> list[nn.Parameter]:
        """What is trained."""
        return parameters_of(self.optimizer)

    def begin(self, lr: float) -> None:
        """The backward passes of a batch follow, whose step will be taken at ``lr``."""

    def step(self, lr: float, loss: float) -> float:
        """Take one step at ``lr``; returns the gradient's global norm before clipping.

        ``loss`` is the batch's loss over all ranks; like the norm it must be finite.
        """
        params = self.params
        _fill_missing(params)
        LEDGER.note_gradients(sum(param.grad.nbytes for param in params if param.grad is not None))
        gradients.sum_over_shares(params, self.ranks)
        norm = gradients.total_norm(params)
        grad_norm = float(norm)
        if math.isfinite(grad_norm) and math.isfinite(loss):
            self._move(params, norm, lr)
            self.in_a_row = 0
        else:
            self.in_a_row += 1
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm

    def _move(self, params: list[nn.Parameter], norm: torch.Tensor, lr: float) -> None:
        if self.grad_clip > 0:
            gradients.clip(params, self.grad_clip, norm)
        set_lr(self.optimizer, lr)
        if self.host is not None:
            self.host.step_all()
        else:
            step_all(self.optimizer, params[0].device)


class BackwardStepper(Stepper):
    """Moves each weight in the backward pass, as soon as its gradient is there, and gives it up.

    A gradient that is not finite moves its own weight not; the step counts as skipped then, though other
    weights have moved.
    """

    def __init__(self, optimizer: Optimizer, ranks: Ranks, *, offload: bool = False) -> None:
        super().__init__(optimizer, 0.0, ranks, offload=offload)
        self._squares: dict[nn.Parameter, float] = {}
        self._lr: float | None = None
        for param in self.params:
            param.register_post_accumulate_grad_hook(self._arrived)

    def begin(self, lr: float) -> None:
        """The backward pass that follows moves the weights at ``lr``."""
        self._lr = lr
        set_lr(self.optimizer, lr)

    def step(self, lr: float, loss: float) -> float:  # noqa: ARG002
        """What is left of the step: its gradient's norm."""
        norm = math.sqrt(math.fsum(self._squares.values()))
        finite = math.isfinite(norm) and math.isfinite(loss)
        self.in_a_row = 0 if finite else self.in_a_row + 1
        self._squares, self._lr = {}, None
        if self.host is not None:
            self.host.settle()
        return norm

    def _arrived(self, param: torch.Tensor) -> None:
        assert isinstance(param, nn.Parameter)
        assert param.grad is not None
        if self._lr is None:
            return  # some other backward pass
        if param in self._squares:
            raise UserError(
                "a second micro-batch would add to gradients that have moved the weights already",
                who="optimizer.in_backward",
                fix="raise packing.micro_batch_tokens until a mini-batch is one micro-batch, or raise "
                "batch.mini_batches, or leave in_backward out",
            )
        square = float(torch.linalg.vector_norm(param.grad, dtype=torch.float32).double().square())
        self._squares[param] = square
        LEDGER.note_gradients(param.grad.nbytes)
        if math.isfinite(square):
            self._move_one(param)
        param.grad = None

    def _move_one(self, param: nn.Parameter) -> None:
        if self.host is not None:
            self.host.step_one(param)
        else:
            step_one(self.optimizer, param)


def _fill_missing(params: Iterable[nn.Parameter]) -> None:
    """A rank whose share was empty has no gradients; the sum over ranks needs the same ones everywhere."""
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
