"""Advantage estimators: pure functions of a packed batch. Statistics are float64.

Notation: s_i is the score of sample i, G its group, n the size of the group, R_t the reward of
token t, V_t the critic's value before it. Every estimator leaves unscorable samples (NaN) and empty
responses out of every statistic and gives them 0; tokens that are not the policy's get 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from posttune import _segments as segments
from posttune.advantage import whiten as whitening
from posttune.advantage.groups import Groups, Singleton, usable
from posttune.errors import UserError
from posttune.types import AdvantageBatch, Advantages, Packed

MaskMode = Literal["carry", "plain", "zero"]


def gae(
    batch: AdvantageBatch,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    mask_mode: MaskMode = "carry",
    whiten: bool = True,
    ddof: int = 1,
    eps: float = 1e-8,
) -> Advantages:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438).

    delta_t = R_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  return_t = A_t + V_t.

    Advantages are whitened over the batch after the returns are taken. ``mask_mode`` says what a
    token inside a response that is not the policy's does: "carry" steps over it (V and A of its
    successor pass through), "plain" takes it for any other token, "zero" does so with reward and
    value 0.
    An unscorable sample's return is its value, which teaches the critic nothing.
    Raises UserError without values.
    """
    if batch.values is None:
        raise UserError("gae needs the values of a critic", fix="configure a critic, or another estimator")
    packed, valid = batch.packed, _tokens(batch.packed, usable(batch))
    rewards, values = batch.token_rewards.double(), batch.values.double()
    if mask_mode == "zero":
        rewards, values = (torch.where(packed.mask, each, 0.0) for each in (rewards, values))
    if mask_mode == "carry":
        raw = _stepping_over(packed, lambda cu, r, v: _gae(r, v, cu, gamma, lam), rewards, values)
    else:
        raw = _gae(rewards, values, packed.cu_seqlens, gamma, lam)
    advantages = torch.where(valid, raw, 0.0)
    returns = torch.where(packed.mask, advantages + values, 0.0)
    if whiten:
        advantages = whitening.whiten(advantages, valid, batch.reduce, ddof=ddof, eps=eps)
    return Advantages(advantages.float(), returns.float(), _metrics(batch))


def _gae(rewards: Tensor, values: Tensor, cu_seqlens: Tensor, gamma: float, lam: float) -> Tensor:
    last = cu_seqlens[1:][cu_seqlens.diff() > 0].long() - 1
    after = values.roll(-1).index_fill(0, last, 0.0)  # V_{t+1}; nothing follows an end
    return segments.suffix_sums(rewards + gamma * after - values, cu_seqlens, gamma * lam)


def _stepping_over(packed: Packed, scan: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """``scan(cu_seqlens, *tensors)`` over the policy's tokens alone: [N], 0 at the others."""
    counts = segments.token_counts(packed)
    cu_seqlens = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    kept = scan(cu_seqlens, *(tensor[packed.mask] for tensor in tensors))
    return torch.zeros_like(tensors[0]).masked_scatter(packed.mask, kept)


def grpo(
    batch: AdvantageBatch,
    *,
    eps: float = 1e-6,
    ddof: int = 1,
    scale: Literal["group", "batch", "none"] = "group",
    singleton: Singleton = "refuse",
) -> Advantages:
    """Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300).

    A_i = (s_i - mean_G) / (std_G + eps). ``scale="batch"`` divides by the deviation of all scores
    instead, ``"none"`` by nothing (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).
    |A| is at most (n - 1) / sqrt(n) for ``scale="group"`` and ``ddof=1``.
    """
    groups = Groups(batch.packed.group, usable(batch), singleton)
    scores = batch.scores.double()
    if scale == "group":
        return _outcome(batch, groups, groups.scaled(scores, eps=eps, ddof=ddof))
    advantages = groups.centred(scores)
    if scale == "batch":
        width = whitening.moments(scores, groups.members, batch.reduce, ddof=ddof).var.sqrt() + eps
        advantages = advantages / torch.where(width > 0, width, 1.0)
    return _outcome(batch, groups, advantages)


def rloo(
    batch: AdvantageBatch, *, standardise: bool = False, eps: float = 1e-4, singleton: Singleton = "refuse"
) -> Advantages:
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740).

    A_i = s_i - mean of the others' scores = (s_i - mean_G) n / (n - 1). ``standardise`` then takes
    (A - mean) / (std + eps) over all samples of the batch.
    """
    groups = Groups(batch.packed.group, usable(batch), singleton)
    others = (groups.size - 1).clamp(min=1)
    advantages = groups.centred(batch.scores.double()) * groups.size / others
    if standardise:
        advantages = whitening.standardise(advantages, _signals(groups), batch.reduce, eps=eps)
    return _outcome(batch, groups, advantages)


def opo(batch: AdvantageBatch, *, singleton: Singleton = "refuse") -> Advantages:
    """On-policy optimisation with the optimal baseline (Hao et al. 2025, arXiv:2505.23585).

    A_i = s_i - sum_G(len_j s_j) / sum_G(len_j), with len the number of the policy's tokens.
    """
    groups = Groups(batch.packed.group, usable(batch), singleton)
    tokens = segments.token_counts(batch.packed).double()
    return _outcome(batch, groups, groups.centred(batch.scores.double(), weights=tokens))


def gpg(batch: AdvantageBatch, *, f_norm: float = 1.0, singleton: Singleton = "refuse") -> Advantages:
    """Group policy gradient (Chu et al. 2025, arXiv:2504.02546).

    A_i = alpha (s_i - mean_G) / f_norm, where alpha = samples / samples whose score is not 0,
    over the whole batch: it makes up for groups that carry no gradient.
    """
    groups = Groups(batch.packed.group, usable(batch), singleton)
    scores = batch.scores.double()
    counts = torch.stack([groups.members.sum(), (groups.members & (scores != 0)).sum()]).double()
    samples, scored = batch.reduce(counts)
    alpha = samples / scored.clamp(min=1)
    return _outcome(batch, groups, alpha * groups.centred(scores) / f_norm)


def grpo_passk(batch: AdvantageBatch, *, eps: float = 1e-6, ddof: int = 1, scale: bool = True) -> Advantages:
    """Pass@k policy gradient (Tang et al. 2025, arXiv:2503.19595).

    The best sample of a group gets (best - second best) / (std_G + eps), all others 0; two equal
    best ones get 0, and so does a group of one, which has no second.
    """
    groups = Groups(batch.packed.group, usable(batch))
    scores = batch.scores.double()
    best = -groups.low(-scores)
    leads = groups.members & (scores == best)
    alone = leads & (groups.sum(leads.double()) == 1) & (groups.size > 1)
    rest = torch.where(leads, -torch.inf, scores)
    second = -groups.low(-rest)
    width = groups.std(scores, ddof) + eps if scale else torch.ones_like(scores)
    lead = (best - second) / torch.where(width > 0, width, 1.0)
    return _outcome(batch, groups, torch.where(alone, lead, 0.0))


def reinforce_plus_plus(
    batch: AdvantageBatch, *, gamma: float = 1.0, whiten: bool = True, ddof: int = 1, eps: float = 1e-8
) -> Advantages:
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262).

    return_t = R_t + gamma return_{t+1} over the policy's tokens (others are stepped over);
    A = returns whitened over the tokens of the batch.
    """
    valid = _tokens(batch.packed, usable(batch))
    returns = torch.where(valid, _returns(batch, gamma), 0.0)
    advantages = whitening.whiten(returns, valid, batch.reduce, ddof=ddof, eps=eps) if whiten else returns
    return Advantages(advantages.float(), returns.float(), _metrics(batch))


def reinforce_plus_plus_baseline(
    batch: AdvantageBatch,
    *,
    whiten: bool = True,
    ddof: int = 1,
    eps: float = 1e-8,
    singleton: Singleton = "refuse",
) -> Advantages:
    """REINFORCE++ with a group baseline (Hu et al. 2025, arXiv:2501.03262).

    A = whiten(s_i - mean_G), over the tokens of the batch. Because of the whitening a group with
    equal scores does not give exactly 0 unless ``whiten`` is off.
    """
    groups = Groups(batch.packed.group, usable(batch), singleton)
    centred = groups.centred(batch.scores.double())
    if not whiten:
        return _outcome(batch, groups, centred)
    return _whitened_outcome(batch, groups, centred, ddof=ddof, eps=eps)


def remax(batch: AdvantageBatch) -> Advantages:
    """ReMax (Li et al. 2023, arXiv:2310.10505).

    A_t = sum of the rewards from t on, minus the score of the greedy answer to the same prompt.
    A sample whose greedy answer is unscorable (NaN) gets 0. Raises UserError without baselines.
    """
    if batch.baselines is None:
        what = "remax needs the score of a greedy answer to each prompt"
        raise UserError(what, fix="use another estimator")
    baselines = batch.baselines.double()
    valid = _tokens(batch.packed, usable(batch) & ~torch.isnan(baselines))
    returns = torch.where(valid, _returns(batch, 1.0), 0.0)
    advantages = torch.where(valid, returns - segments.spread(baselines, batch.packed), 0.0)
    return Advantages(advantages.float(), returns.float(), _metrics(batch))


def gdpo(
    batch: AdvantageBatch,
    *,
    weights: Mapping[str, float] | None = None,
    eps: float = 1e-6,
    ddof: int = 1,
    whiten: Literal["tokens", "sequences", "none"] = "tokens",
    whiten_eps: float = 1e-8,
    singleton: Singleton = "refuse",
) -> Advantages:
    """Group reward-decoupled normalisation (Liu et al. 2026, arXiv:2601.05242).

    A_i = sum_k w_k (s_ik - mean_G,k) / (std_G,k + eps) over the dimensions k of the reward, then
    (A - mean) / sqrt(var + whiten_eps) over the tokens of the batch, or (A - mean) / (std +
    whiten_eps) over its sequences. A weight defaults to 1. A dimension that is
    NaN for a sample adds nothing to it. Without dimensions the score is the only one.
    Raises UserError when a weight names a dimension that the batch lacks.
    """
    dims = dict(batch.dims) or {"score": batch.scores}
    unknown = sorted(set(weights or ()) - set(dims))
    if unknown:
        what = f"gdpo has weights for {', '.join(unknown)}, but the rewards give {', '.join(sorted(dims))}"
        raise UserError(what, fix="correct the weights of the advantage estimator")
    groups = Groups(batch.packed.group, usable(batch), singleton)
    total = torch.zeros_like(batch.scores, dtype=torch.float64)
    for name in sorted(dims):
        scores = dims[name].double()
        present = Groups(batch.packed.group, groups.members & ~torch.isnan(scores), singleton)
        total = total + (weights or {}).get(name, 1.0) * present.scaled(scores, eps=eps, ddof=ddof)
    if whiten == "tokens":
        return _whitened_outcome(batch, groups, total, ddof=ddof, eps=whiten_eps)
    if whiten == "sequences":
        total = whitening.standardise(total, _signals(groups), batch.reduce, ddof=ddof, eps=whiten_eps)
    return _outcome(batch, groups, total)


def _returns(batch: AdvantageBatch, gamma: float) -> Tensor:
    """Discounted rewards from each of the policy's tokens on; others are stepped over."""

    def scan(cu: Tensor, rewards: Tensor) -> Tensor:
        return segments.suffix_sums(rewards, cu, gamma)

    return _stepping_over(batch.packed, scan, batch.token_rewards.double())


def _tokens(packed: Packed, members: Tensor) -> Tensor:
    """The policy's tokens of the given samples: bool [N]."""
    return packed.mask & segments.spread(members, packed)


def _signals(groups: Groups) -> Tensor:
    """Members that a statistic over the batch sees: all but groups of one that get 0 by policy."""
    return groups.members & ~(groups.single & ~groups.raw)


def _outcome(batch: AdvantageBatch, groups: Groups, per_sample: Tensor) -> Advantages:
    """The same advantage at each token of a sample."""
    valid = _tokens(batch.packed, groups.members)
    advantages = torch.where(valid, segments.spread(per_sample, batch.packed), 0.0)
    return Advantages(advantages.float(), None, _metrics(batch, groups))


def _whitened_outcome(
    batch: AdvantageBatch, groups: Groups, per_sample: Tensor, *, ddof: int, eps: float
) -> Advantages:
    valid = _tokens(batch.packed, _signals(groups))
    tokens = segments.spread(per_sample, batch.packed)
    advantages = whitening.whiten(tokens, valid, batch.reduce, ddof=ddof, eps=eps)
    return Advantages(advantages.float(), None, _metrics(batch, groups))


def _metrics(batch: AdvantageBatch, groups: Groups | None = None) -> dict[str, float]:
    """Shares over all ranks: samples without a score, and groups (of two or more) of equal scores."""
    unscorable = torch.isnan(batch.scores).double()
    counts = [unscorable.sum(), torch.ones_like(unscorable).sum()]
    if groups is not None:
        per_member = 1 / groups.size.clamp(min=1)  # adds up to one a group
        for chosen in (groups.constant(batch.scores.double()), groups.members):
            counts.append(torch.where(chosen, per_member, 0.0).sum())
    total = batch.reduce(torch.stack(counts)).tolist()
    metrics = {"advantage/unscorable": total[0] / max(total[1], 1)}
    if groups is not None:
        metrics["advantage/constant_groups"] = total[2] / max(total[3], 1)
    return metrics
