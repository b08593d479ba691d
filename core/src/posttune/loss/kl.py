"""Estimators of KL(pi || pi_ref) from the log-probabilities of sampled tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttune.loss.kl_names import canonical, check_loss_estimator

__all__ = ["Clamp", "check_loss_estimator", "kl_terms"]

Clamp = Literal["verl", "output", "none"]


def kl_terms(
    logp: Tensor, ref_logp: Tensor, estimator: str, clamp: Clamp = "verl", mask: Tensor | None = None
) -> Tensor:
    """One term per token, in the shape and type of ``logp`` (Schulman 2020, "Approximating KL divergence").

    With d = logp - ref_logp:  k1 = d;  k2 = d^2 / 2;  k3 = exp(-d) + d - 1;  abs = |d|. "k1+" has the
    value of k1 and the gradient of k2, and so for the others: as a loss, k2 alone has the gradient
    of the KL in expectation.
    ``clamp``: "verl" limits -d to +-20 and the value to +-10 in k3 alone; "output" limits every value
    to +-10 (OpenRLHF); "none" nothing (TRL). The gradient is 0 beyond a limit.
    Where ``mask`` is given and False, term and gradient are 0 whatever stands there.
    """
    name = canonical(estimator)
    d = logp - ref_logp if mask is None else torch.where(mask, logp, 0.0) - torch.where(mask, ref_logp, 0.0)
    value = _value(d, name.rstrip("+"), clamp)
    if not name.endswith("+"):
        return value
    square = 0.5 * d.square()
    return value.detach() + (square - square.detach())


def _value(d: Tensor, name: str, clamp: Clamp) -> Tensor:
    if name == "k1":
        value = d
    elif name == "abs":
        value = d.abs()
    elif name == "k2":
        value = 0.5 * d.square()
    else:
        minus = (-d).clamp(-20, 20) if clamp == "verl" else -d
        value = torch.exp(minus) - minus - 1
    limited = clamp == "output" or (clamp == "verl" and name == "k3")
    return value.clamp(-10, 10) if limited else value
