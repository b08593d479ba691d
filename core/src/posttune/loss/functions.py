"""Policy losses: pure functions of a packed batch to the loss of each response token, unreduced.

Notation: r = pi / pi_old of a token; A its advantage; s = exp(mean of log r over the sequence), the
ratio of a sequence. ``level="sequence"`` puts s in the place of r: each token then has the value of
s and the gradient s * d log pi (GSPO-token), which is the gradient of s itself once the tokens of
the sequence are averaged. Tokens that are not the policy's get 0 and no gradient, whatever they hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from posttune import _segments as segments
from posttune.types import LossBatch, TokenLoss

Level = Literal["token", "sequence"]
LOG_RATIO_LIMIT = 20.0  # of verl: exp(20) is about 5e8
SMALLEST_LOG_WEIGHT = math.log(1e-8)  # of VESPO's own code


def ppo_clip(
    batch: LossBatch,
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = 3.0,
    level: Level = "token",
    limit: float | None = LOG_RATIO_LIMIT,
) -> TokenLoss:
    """Clipped surrogate (Schulman et al. 2017, arXiv:1707.06347).

    L = max(-A r, -A clip(r, 1 - low, 1 + high)). ``high`` above ``low`` is DAPO's clip-higher
    (arXiv:2503.14476). Dual clip (Ye et al. 2019, arXiv:1912.09729): where A < 0, L = min(L, -A dual),
    with dual > 1; None is off. ``level="sequence"`` is GSPO (Zheng et al. 2025, arXiv:2507.18071).
    log r is clamped to +-``limit``.
    """
    ratio, advantages = _log_ratio(batch, level, limit).exp(), _advantages(batch)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(unclipped, clipped)
    events = {"clip_fraction": clipped > unclipped}
    if dual is not None:
        cap = -advantages * dual
        events["dual_clip_fraction"] = (loss > cap) & (advantages < 0)
        loss = torch.where(advantages < 0, torch.minimum(loss, cap), loss)
    return _token_loss(batch, loss, events)


def cispo(
    batch: LossBatch,
    *,
    low: float | None = 0.2,
    high: float = 0.2,
    bounds: Literal["relative", "absolute"] = "relative",
    level: Level = "token",
    limit: float | None = LOG_RATIO_LIMIT,
) -> TokenLoss:
    """Clipped importance-sampling weights (MiniMax-M1 2025, arXiv:2506.13585).

    L = -sg(w) A log pi, where sg stops the gradient. Two conventions for w are in use:
    "relative", w = clip(r, 1 - low, 1 + high), as in verl; "absolute", w = min(r, high), as in TRL,
    where ``high`` is the largest weight itself (about 5) and ``low`` is not used.
    """
    ratio = _log_ratio(batch, level, limit).exp().detach()
    if bounds == "absolute":
        weight = ratio.clamp(max=high)
    else:
        weight = ratio.clamp(None if low is None else 1 - low, 1 + high)
    loss = -weight * _advantages(batch) * _logp(batch)
    return _token_loss(batch, loss, {"clip_fraction": weight != ratio})


def sapo(
    batch: LossBatch,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    level: Level = "token",
    limit: float | None = LOG_RATIO_LIMIT,
) -> TokenLoss:
    """Soft adaptive policy optimisation (Gao et al. 2025, arXiv:2511.20347).

    L = -A sigmoid(tau (r - 1)) 4 / tau, with one temperature where A > 0 and another elsewhere.
    """
    ratio, advantages = _log_ratio(batch, level, limit).exp(), _advantages(batch)
    tau = torch.where(advantages > 0, tau_positive, tau_negative).to(ratio.dtype)
    loss = -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return _token_loss(batch, loss, {})


def geo_mean(batch: LossBatch, *, low: float = 0.4, high: float = 0.4) -> TokenLoss:
    """Geometric-mean policy optimisation (Zhao et al. 2025, arXiv:2507.20673).

    L = -A exp(mean over the sequence of log r'), where log r' is log r clipped to [-low, high] on
    the side that A makes profitable, and A the mean advantage of the sequence. Each token carries
    its sequence's loss; average with seq_mean_token_mean.
    """
    log_ratio, sign = _log_ratio(batch, "token", None), torch.sign(_advantages(batch))
    clipped = log_ratio.clamp(-low, high)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * clipped)
    ratio = segments.masked_means(pessimistic, batch.packed).exp()
    advantage = segments.masked_means(_advantages(batch), batch.packed)
    loss = segments.spread(-advantage * ratio, batch.packed)
    outside = log_ratio != clipped
    return _token_loss(
        batch,
        loss,
        {"clip_fraction": outside & (sign > 0), "negative_clip_fraction": outside & (sign < 0)},
    )


def dppo_tv(batch: LossBatch, *, low: float = 0.15, high: float = 0.15, cap: float = 20.0) -> TokenLoss:
    """Divergence PPO with the binary total variation (Qi et al. 2026, arXiv:2602.04879).

    L = -A sg(min(r, cap)) log pi for the tokens inside the trust region, 0 for the others. A token
    is outside where the update would move on from pi - pi_old > high (A > 0) or < -low (A <= 0).
    """
    difference = _logp(batch).detach().exp() - _old(batch).exp()
    inside = torch.where(batch.advantages > 0, difference <= high, difference >= -low)
    return _dppo(batch, inside, cap)


def dppo_kl(batch: LossBatch, *, low: float = 0.05, high: float = 0.05, cap: float = 20.0) -> TokenLoss:
    """Divergence PPO with the binary KL (Qi et al. 2026, arXiv:2602.04879).

    As ``dppo_tv``; a token is outside where KL(pi_old || pi) of "this token or another" exceeds
    high (A > 0) or low (A <= 0) and the update would raise it.
    """
    logp, old_logp = _logp(batch).detach(), _old(batch)
    new, old = logp.exp(), old_logp.exp()
    others = torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
    divergence = old * (old_logp - logp) + (1 - old) * others
    up = (divergence <= high) | (new <= old)
    down = (divergence <= low) | (new >= old)
    return _dppo(batch, torch.where(batch.advantages > 0, up, down), cap)


def _dppo(batch: LossBatch, inside: Tensor, cap: float) -> TokenLoss:
    ratio = _log_ratio(batch, "token", LOG_RATIO_LIMIT).exp().detach()
    weight = torch.where(inside, ratio.clamp(max=cap), 0.0)
    loss = -weight * _advantages(batch) * _logp(batch)
    return _token_loss(batch, loss, {"clip_fraction": ~inside, "truncated_fraction": inside & (ratio > cap)})


def gpg(batch: LossBatch) -> TokenLoss:
    """Plain policy gradient (Chu et al. 2025, arXiv:2504.02546): L = -A log pi, no ratio."""
    return _token_loss(batch, -_advantages(batch) * _logp(batch), {})


def vespo(
    batch: LossBatch,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> TokenLoss:
    """Variational sequence-level soft policy optimisation (arXiv:2602.10693).

    L = -sg(phi(w)) A log pi, with w = prod r over the sequence (no length normalisation) and
    phi(w) = w^k exp(lambda (1 - w)), so that phi(1) = 1; k and lambda by the sign of A (0 counts as
    positive). log r is clamped to +-20, log w to [log 1e-8, 20]; phi is 0 where it overflows.
    """
    log_ratio = _log_ratio(batch, "token", LOG_RATIO_LIMIT).detach()
    log_weight = segments.spread(segments.masked_sums(log_ratio, batch.packed), batch.packed)
    log_weight = log_weight.clamp(SMALLEST_LOG_WEIGHT, LOG_RATIO_LIMIT)
    positive = _advantages(batch) >= 0
    k = torch.where(positive, k_positive, k_negative)
    lam = torch.where(positive, lambda_positive, lambda_negative)
    log_phi = lam + k * log_weight - lam * log_weight.exp()
    phi = log_phi.exp().nan_to_num(nan=0.0, posinf=0.0)
    loss = -phi.to(log_ratio.dtype) * _advantages(batch) * _logp(batch)
    sums = (torch.where(batch.packed.mask, phi, 0.0).sum(), batch.packed.mask.sum())
    return _token_loss(batch, loss, {}, {"phi_mean": sums})


def _advantages(batch: LossBatch) -> Tensor:
    return torch.where(batch.packed.mask, batch.advantages, 0.0)


def _logp(batch: LossBatch) -> Tensor:
    """With its gradient; masked before anything non-linear, since 0 * infinity in a gradient is NaN."""
    return torch.where(batch.packed.mask, batch.logp, 0.0)


def _old(batch: LossBatch) -> Tensor:
    return torch.where(batch.packed.mask, batch.old_logp, 0.0)


def _log_ratio(batch: LossBatch, level: Level, limit: float | None) -> Tensor:
    """log r, or log s with the gradient of log pi: [N]. Clamped to +-limit, where one is given."""
    logp = _logp(batch)
    log_ratio = logp - _old(batch)
    if level == "sequence":
        mean = segments.masked_means(log_ratio.detach(), batch.packed)
        log_ratio = logp - logp.detach() + segments.spread(mean, batch.packed)
    return log_ratio if limit is None else log_ratio.clamp(-limit, limit)


def _token_loss(
    batch: LossBatch,
    loss: Tensor,
    events: Mapping[str, Tensor],
    extra: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> TokenLoss:
    """Masked loss, and the share of the policy's tokens at which each event (bool [N]) happens."""
    mask = batch.packed.mask
    count = mask.sum()
    shares = {name: ((event & mask).sum(), count) for name, event in events.items()}
    drift = (_old(batch) - _logp(batch).detach()).sum()
    return TokenLoss(torch.where(mask, loss, 0.0), {**shares, "approx_kl": (drift, count), **(extra or {})})
