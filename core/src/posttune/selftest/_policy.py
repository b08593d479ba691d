"""The families of gold cases that are policy losses, in the conventions of verl and of TRL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from posttune.loss import functions as losses
from posttune.loss.aggregate import MODES, aggregate
from posttune.selftest._case import Inputs
from posttune.selftest._padded import Padded
from posttune.selftest.gold import Got
from posttune.types import LossBatch, TokenLoss

Results = dict[str, Got]
LossFunction = Callable[[LossBatch], TokenLoss]

VERL_MODES = {"sapo": "seq_mean_token_mean", "geo_mean": "seq_mean_token_mean"}  # whatever the case says
TRL_MODES = {
    "grpo": "seq_mean_token_mean",
    "sapo": "seq_mean_token_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "vespo": "token_mean",
    "dr_grpo": "seq_mean_token_sum_norm",
    "luspo": "seq_mean_token_sum",
}
METRICS = {"clipfrac": "clip_fraction", "clipfrac_lower": "dual_clip_fraction", "ppo_kl": "approx_kl"}


def ppo_clip(inputs: Inputs) -> Results | None:
    """``ppo_clip/<aggregation>/c=<dual clip>`` and ``dual_clip/c=<dual clip>``, of verl."""
    function = partial(losses.ppo_clip, **_range(inputs), dual=_dual(inputs))
    return policy_loss(inputs, function, mode_of(inputs.word(0, "token-mean")))


def verl(inputs: Inputs) -> Results | None:
    """``policy/<loss>/<aggregation>``. verl's geo_mean averages over rows without tokens too."""
    name = inputs.word(0)
    function = _verl_loss(inputs, name)
    if function is None:
        return None
    mode = VERL_MODES.get(name, mode_of(inputs.word(1, "token-mean")))
    return policy_loss(inputs, function, mode, all_rows=name == "geo_mean")


def _verl_loss(inputs: Inputs, name: str) -> LossFunction | None:
    clip = _range(inputs)
    known: dict[str, LossFunction] = {
        "vanilla": partial(losses.ppo_clip, **clip, dual=_dual(inputs)),
        "gspo": partial(losses.ppo_clip, **clip, dual=None, level="sequence", limit=10.0),
        "cispo": partial(losses.cispo, **clip),
        "sapo": partial(losses.sapo, **_temperatures(inputs)),
        "geo_mean": partial(losses.geo_mean, **clip),
        "dppo_tv": partial(losses.dppo_tv, **clip, cap=_dual(inputs)),
        "dppo_kl": partial(losses.dppo_kl, **clip, cap=_dual(inputs)),
        "gpg": losses.gpg,
    }
    return known.get(name)


def trl(inputs: Inputs) -> Results | None:
    """``trl/<loss_type>/<token|sequence>``. TRL averages over rows without tokens too."""
    kind, level = inputs.word(0), inputs.word(1, "token")
    if kind not in TRL_MODES or level not in ("token", "sequence"):
        return None
    function = _trl_loss(inputs, kind, "sequence" if level == "sequence" else "token")
    scale = inputs.optional("max_completion_length")
    return policy_loss(inputs, function, TRL_MODES[kind], all_rows=True, scale=scale)


def _trl_loss(inputs: Inputs, kind: str, level: losses.Level) -> LossFunction:
    clip = _range(inputs)
    if kind == "cispo":
        return partial(losses.cispo, high=clip["high"], bounds="absolute", level=level, limit=None)
    if kind == "sapo":
        return partial(losses.sapo, **_temperatures(inputs), level=level, limit=None)
    if kind == "vespo":
        return partial(losses.vespo, **_vespo(inputs))
    return partial(losses.ppo_clip, **clip, dual=inputs.optional("delta"), level=level, limit=None)


def _range(inputs: Inputs) -> dict[str, Any]:
    both = inputs.number("clip_ratio", "epsilon", default=0.2)
    low = inputs.number("clip_low", "clip_ratio_low", "epsilon_low", default=both)
    return {"low": low, "high": inputs.number("clip_high", "clip_ratio_high", "epsilon_high", default=both)}


def _dual(inputs: Inputs) -> float:
    """verl's ``clip_ratio_c``: 3 in its actor's configuration, for every loss that reads it."""
    given = inputs.pairs.get("c", "3")
    try:
        return inputs.number("clip_c", "clip_ratio_c", default=float(given))
    except ValueError as error:
        raise inputs.fault(f"c={given} is no number") from error


def _temperatures(inputs: Inputs) -> dict[str, Any]:
    return {
        "tau_positive": inputs.number("tau_pos", "sapo_temperature_pos", default=1.0),
        "tau_negative": inputs.number("tau_neg", "sapo_temperature_neg", default=1.05),
    }


def _vespo(inputs: Inputs) -> dict[str, Any]:
    return {
        "k_positive": inputs.number("k_pos", "vespo_k_pos", default=2.0),
        "lambda_positive": inputs.number("lambda_pos", "vespo_lambda_pos", default=3.0),
        "k_negative": inputs.number("k_neg", "vespo_k_neg", default=3.0),
        "lambda_negative": inputs.number("lambda_neg", "vespo_lambda_neg", default=2.0),
    }


def mode_of(name: str) -> str:
    """Our name of an aggregation."""
    return name.replace("-", "_")


def policy_loss(
    inputs: Inputs, function: LossFunction, mode: str, *, all_rows: bool = False, scale: float | None = None
) -> Results | None:
    """Loss, gradient by the padded log-probabilities, and the metrics that cases have a name for."""
    if mode not in MODES:
        return None
    padded = Padded.of(inputs, "logp")
    logp = inputs.tensor("logp").requires_grad_()
    batch = LossBatch(
        packed=padded.packed,
        logp=padded.packing(inputs, "logp", logp),
        old_logp=padded.pack(inputs, "old_logp"),
        rollout_logp=None,
        advantages=padded.pack(inputs, "advantages"),
    )
    found = function(batch)
    loss = aggregate(found.loss, padded.packed, mode, padded.totals(all_rows=all_rows), scale)
    (grad,) = torch.autograd.grad(loss, logp)
    metrics = {"clipfrac_lower": Got(0.0), **shares(found, METRICS)}
    return {"loss": Got(loss.item()), "grad": Got(grad.tolist()), **metrics}


def shares(found: TokenLoss, names: Mapping[str, str]) -> Results:
    """Metrics as means, by the name that cases have for them."""
    present = {key: found.metrics[name] for key, name in names.items() if name in found.metrics}
    return {key: Got(float(total) / max(float(count), 1.0)) for key, (total, count) in present.items()}
