"""The families of gold cases that are advantage estimators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from posttune.advantage import functions
from posttune.selftest._case import Inputs
from posttune.selftest._padded import Padded
from posttune.selftest.gold import Got
from posttune.types import AdvantageBatch, Advantages

Results = dict[str, Got]

# Our function, and which of the case's options it takes.
ESTIMATORS: dict[str, tuple[Callable[..., Advantages], tuple[str, ...]]] = {
    "grpo": (functions.grpo, ("eps", "scale", "singleton")),
    "grpo_vectorized": (functions.grpo, ("eps", "scale", "singleton")),
    "dr_grpo": (partial(functions.grpo, scale="none"), ("singleton",)),
    "rloo": (functions.rloo, ("singleton",)),
    "rloo_vectorized": (partial(functions.rloo, singleton="zero"), ()),
    "opo": (functions.opo, ("singleton",)),
    "gpg": (functions.gpg, ("f_norm", "singleton")),
    "gdpo": (functions.gdpo, ("eps", "weights", "singleton")),
    "reinforce_plus_plus": (functions.reinforce_plus_plus, ("gamma", "ddof")),
    "reinforce_plus_plus_baseline": (functions.reinforce_plus_plus_baseline, ("ddof", "singleton")),
    "remax": (functions.remax, ()),
}


def outcome(inputs: Inputs) -> Results:
    """Families whose outputs are ``advantages`` and perhaps ``returns``."""
    function, names = ESTIMATORS[inputs.family]
    padded, batch = _batch(inputs)
    options = _options(inputs)
    return _results(padded, function(batch, **{name: options[name] for name in names}))


def passk(inputs: Inputs) -> Results:
    """``grpo_passk``, whose scaling is a flag."""
    padded, batch = _batch(inputs)
    scale = inputs.flag("std", "norm_adv_by_std_in_grpo")
    return _results(padded, functions.grpo_passk(batch, eps=_eps(inputs), scale=scale))


def gae(inputs: Inputs) -> Results:
    """``gae``: the advantages before and after whitening."""
    padded, batch = _batch(inputs)
    compute = partial(
        functions.gae,
        batch,
        gamma=inputs.number("gamma", default=1.0),
        lam=inputs.number("lam", default=1.0),
        mask_mode=inputs.conventions.mask_mode,
        ddof=inputs.conventions.ddof,
    )
    whitened = _results(padded, compute(whiten=True))
    raw = padded.got(compute(whiten=False).advantages)
    return {**whitened, "advantages_whitened": whitened["advantages"], "raw_advantages": raw}


def trl(inputs: Inputs) -> Results | None:
    """``trl_adv``: rewards [B], or [B, functions] with weights; null where a function gave no answer."""
    rewards = inputs.tensor("rewards")
    each = rewards[:, None] if rewards.dim() == 1 else rewards
    weights = inputs.tensor("weights") if "weights" in inputs else torch.ones_like(each[0])
    scores = (each * weights).nansum(1).masked_fill(each.isnan().all(1), torch.nan)
    packed = Padded(torch.ones(len(scores), 1), inputs.groups(len(scores))).packed
    dims = {str(place): column for place, column in enumerate(each.unbind(1))}
    batch = AdvantageBatch(packed, scores, scores, dims, None, None, _one_rank)
    kind, eps = inputs.word(0, "group"), inputs.number("eps", "epsilon", default=1e-4)
    if kind == "normalize_then_sum":
        named = {name: float(weight) for name, weight in zip(dims, weights, strict=True)}
        found = functions.gdpo(
            batch, weights=named, eps=eps, whiten="sequences", whiten_eps=eps, singleton="zero"
        )
    elif kind in ("group", "batch", "none"):
        found = functions.grpo(batch, eps=eps, scale=kind, singleton="zero")  # type: ignore[arg-type]
    else:
        return None
    return {"advantages": Got(found.advantages.tolist())}


def _batch(inputs: Inputs) -> tuple[Padded, AdvantageBatch]:
    """A score stands at the last token of its row; rewards per token add up to the score."""
    per_token = "rewards" in inputs
    padded = Padded.of(inputs, "rewards" if per_token else "mask")
    scores = inputs.tensor("rewards").sum(-1) if per_token else inputs.tensor("scores")
    if scores.shape != padded.lengths.shape:
        raise inputs.fault(f"{list(scores.shape)} scores for {len(padded.lengths)} rows of the mask")
    batch = AdvantageBatch(
        packed=padded.packed,
        token_rewards=padded.pack(inputs, "rewards") if per_token else padded.at_end(scores),
        scores=scores,
        dims={name: inputs.tensor(f"dims.{name}", value) for name, value in inputs.named("dims").items()},
        values=padded.pack(inputs, "values") if "values" in inputs else None,
        baselines=inputs.tensor("baselines") if "baselines" in inputs else None,
        reduce=_one_rank,
    )
    return padded, batch


def _one_rank(part: Tensor) -> Tensor:
    return part


def _eps(inputs: Inputs) -> float:
    return inputs.number("eps", "epsilon", default=inputs.conventions.eps)


def _options(inputs: Inputs) -> dict[str, Any]:
    return {
        "eps": _eps(inputs),
        "scale": "group" if inputs.flag("std", "norm_adv_by_std_in_grpo") else "none",
        "singleton": inputs.conventions.singleton,
        "ddof": inputs.conventions.ddof,
        "gamma": inputs.number("gamma", default=1.0),
        "f_norm": inputs.number("f_norm", default=1.0),
        "weights": inputs.named("weights"),
    }


def _results(padded: Padded, found: Advantages) -> Results:
    advantages = padded.got(found.advantages)
    returns = advantages if found.returns is None else padded.got(found.returns)
    return {"advantages": advantages, "returns": returns}
