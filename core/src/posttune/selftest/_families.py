"""The families of gold cases, by the first part of a case's name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from posttune.advantage.whiten import whiten
from posttune.loss.aggregate import MODES, aggregate
from posttune.loss.controllers import AdaptiveKL
from posttune.loss.entropy import entropy
from posttune.loss.kl import kl_terms
from posttune.loss.kl_names import ALIASES, ESTIMATORS
from posttune.loss.value import value_loss
from posttune.selftest import _estimators, _policy
from posttune.selftest._case import Inputs
from posttune.selftest._padded import Padded
from posttune.selftest.gold import Case, Got
from posttune.types import Totals

Results = dict[str, Got]


def compute(case: Case) -> Results | None:
    """Every output that we know of a case; None where its family or variant is unknown."""
    inputs = Inputs(case)
    family = FAMILIES.get(inputs.family)
    return family(inputs) if family else None


def _masked_whiten(inputs: Inputs) -> Results:
    padded = Padded.of(inputs, "values")
    out = whiten(
        padded.pack(inputs, "values"),
        padded.packed.mask,
        lambda part: part,
        ddof=inputs.conventions.ddof,
        shift_mean=inputs.flag("shift_mean"),
    )
    return {"out": padded.got(out)}


def _kl(inputs: Inputs) -> Results | None:
    name = inputs.word(0)
    if name.removesuffix("+") not in (*ESTIMATORS, *ALIASES):
        return None
    logp, ref_logp = inputs.tensor("logp").requires_grad_(), inputs.tensor("ref_logp")
    if logp.shape != ref_logp.shape:
        raise inputs.fault("inputs 'logp' and 'ref_logp' differ in shape")
    value = kl_terms(logp, ref_logp, name, inputs.conventions.clamp)
    (grad,) = torch.autograd.grad(value.sum(), logp)
    return {"value": Got(value.tolist()), "grad_wrt_logp": Got(grad.tolist()), "grad": Got(grad.tolist())}


def _adaptive_kl(inputs: Inputs) -> Results:
    number = inputs.number
    controller = AdaptiveKL(number("init"), target=number("target"), horizon=number("horizon"))
    values = []
    for kl in inputs.tensor("kls").tolist():
        controller.update(kl=kl, n=int(number("n")))
        values.append(controller.coef)
    return {"values": Got(values)}


def _aggregation(inputs: Inputs) -> Results | None:
    """verl multiplies by ``dp_size``, since its ranks average gradients where ours add them up."""
    mode = _policy.mode_of(inputs.word(0))
    if mode not in MODES:
        return None
    padded = Padded.of(inputs, "loss")
    own = padded.totals()
    tokens = inputs.number("batch_num_tokens", default=own.tokens)
    sequences = inputs.number("global_batch_size", default=own.sequences)
    totals = Totals(int(tokens), int(sequences), own.max_length)
    loss = inputs.tensor("loss").requires_grad_()
    packed_loss = padded.packing(inputs, "loss", loss)
    value = aggregate(packed_loss, padded.packed, mode, totals, inputs.optional("loss_scale_factor"))
    value = value * inputs.number("dp_size", default=1)
    (grad,) = torch.autograd.grad(value, loss)
    return {"value": Got(value.item()), "grad": Got(grad.tolist())}


def _value_loss(inputs: Inputs) -> Results | None:
    mode = _policy.mode_of(inputs.word(0, "token-mean"))
    if mode not in MODES:
        return None
    padded = Padded.of(inputs, "vpreds")
    new = inputs.tensor("vpreds").requires_grad_()
    found = value_loss(
        padded.packing(inputs, "vpreds", new),
        padded.pack(inputs, "values"),
        padded.pack(inputs, "returns"),
        padded.packed.mask,
        inputs.number("cliprange", "cliprange_value", default=0.2),
    )
    loss = aggregate(found.loss, padded.packed, mode, padded.totals())
    (grad,) = torch.autograd.grad(loss, new)
    metrics = _policy.shares(found, {"clipfrac": "value/clip_fraction"})
    return {"loss": Got(loss.item()), "grad": Got(grad.tolist()), **metrics}


def _entropy(inputs: Inputs) -> Results:
    return {"value": Got(entropy(inputs.tensor("logits")).tolist())}


FAMILIES: dict[str, Callable[[Inputs], Results | None]] = {
    **dict.fromkeys(_estimators.ESTIMATORS, _estimators.outcome),
    "grpo_passk": _estimators.passk,
    "gae": _estimators.gae,
    "trl_adv": _estimators.trl,
    "masked_whiten": _masked_whiten,
    "kl": _kl,
    "adaptive_kl": _adaptive_kl,
    "agg": _aggregation,
    "ppo_clip": _policy.ppo_clip,
    "dual_clip": _policy.ppo_clip,
    "policy": _policy.verl,
    "trl": _policy.trl,
    "value_loss": _value_loss,
    "entropy": _entropy,
}
