"""Advantage estimators and policy losses: packed tensors in, checked tensors out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from posttune.errors import PluginReturnError, RunError
from posttune.facade.values import as_number, shown
from posttune.pipeline import Member
from posttune.types import AdvantageBatch, Advantages, LossBatch, LossTraits, Packed, TokenLoss, Traits

if TYPE_CHECKING:
    import torch

_ESTIMATE = "advantage_estimator_compute"
_LOSS = "policy_loss_compute"


class Estimator:
    """An advantage estimator. ``traits`` says what it needs."""

    def __init__(self, member: Member) -> None:
        self._member = member
        traits = member.call("advantage_estimator_traits")
        if not isinstance(traits, Traits):
            raise member.wrong("advantage_estimator_traits", f"{shown(traits)}, not Traits")
        self.traits = traits

    def compute(self, batch: AdvantageBatch) -> Advantages:
        """Advantages, float32 [N], finite, 0 where not mask and for unscorable samples."""
        self._require_inputs(batch)
        result = self._member.call(_ESTIMATE, batch=batch)
        if not isinstance(result, Advantages):
            raise self._wrong(f"{shown(result)}, not Advantages")
        self._check(result.advantages, "advantages", batch)
        if bool((result.advantages.masked_select(_inactive(batch)) != 0).any()):
            raise self._wrong("advantages that are not 0 where the mask is False or the sample unscorable")
        if result.returns is not None:
            self._check(result.returns, "returns", batch)
        elif self.traits.needs_critic:
            raise self._wrong("no returns, which its critic must learn")
        bad = [name for name, value in result.metrics.items() if as_number(value) is None]
        if bad:
            raise self._wrong(f"{shown(result.metrics[bad[0]])} as metric {bad[0]!r}")
        return result

    def _require_inputs(self, batch: AdvantageBatch) -> None:
        for given, needed, what in (
            (batch.values, self.traits.needs_critic, "the values of a critic"),
            (batch.baselines, self.traits.needs_greedy_baseline, "the scores of greedy answers"),
        ):
            if needed and given is None:
                raise RunError(f"it needs {what}, and the batch has none", who=str(self._member.id))

    def _check(self, values: torch.Tensor, name: str, batch: AdvantageBatch) -> None:
        import torch

        fault = _tensor_fault(values, batch.token_rewards, torch.float32)
        if not fault and not bool(torch.isfinite(values[batch.packed.mask]).all()):
            fault = "values that are not finite"
        if fault:
            raise self._wrong(f"{name} with {fault}")

    def _wrong(self, what: str) -> PluginReturnError:
        return self._member.wrong(_ESTIMATE, what)


class PolicyLoss:
    """A policy loss. ``traits`` says what it is."""

    def __init__(self, member: Member) -> None:
        self._member = member
        traits = member.call("policy_loss_traits")
        if not isinstance(traits, LossTraits):
            raise member.wrong("policy_loss_traits", f"{shown(traits)}, not LossTraits")
        self.traits = traits

    def compute(self, batch: LossBatch) -> TokenLoss:
        """Loss of each response token, [N], unreduced, with a gradient where ``logp`` has one.

        A value that is not finite passes: the trainer decides what to do about it.
        """
        result = self._member.call(_LOSS, batch=batch)
        if not isinstance(result, TokenLoss):
            raise self._wrong(f"{shown(result)}, not TokenLoss")
        fault = _tensor_fault(result.loss, batch.logp, batch.logp.dtype)
        if fault:
            raise self._wrong(f"a loss with {fault}")
        if batch.logp.requires_grad and batch.logp.numel() and not result.loss.requires_grad:
            raise self._wrong("a loss without a gradient, from which nothing would be learnt")
        return TokenLoss(result.loss, self._metrics(result.metrics))

    def _metrics(self, metrics: object) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        """The metrics without their graph, which would keep a batch's memory."""
        if not isinstance(metrics, Mapping):
            raise self._wrong(f"{shown(metrics)} as metrics, not a dict")
        return {str(name): self._pair(str(name), pair) for name, pair in metrics.items()}

    def _pair(self, name: str, pair: object) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        scalars = isinstance(pair, tuple) and all(
            isinstance(part, torch.Tensor) and part.numel() == 1 for part in pair
        )
        if not isinstance(pair, tuple) or len(pair) != 2 or not scalars:
            raise self._wrong(f"metric {name!r} that is not a pair of tensors (sum, count)")
        return pair[0].detach(), pair[1].detach()

    def _wrong(self, what: str) -> PluginReturnError:
        return self._member.wrong(_LOSS, what)


def _tensor_fault(value: object, like: torch.Tensor, dtype: torch.dtype) -> str:
    """What is wrong with a tensor that should have the shape and device of ``like``."""
    import torch

    if not isinstance(value, torch.Tensor):
        return f"{shown(value)} in place of a tensor"
    if value.shape != like.shape:
        return f"shape {list(value.shape)} in place of {list(like.shape)}"
    if value.dtype != dtype:
        return f"{value.dtype} in place of {dtype}"
    if value.device != like.device:
        return f"device {value.device} in place of {like.device}"
    return ""


def _inactive(batch: AdvantageBatch) -> torch.Tensor:
    """bool [N]: tokens that must have no advantage."""
    import torch

    unscorable = torch.isnan(batch.scores).repeat_interleave(_lengths(batch.packed))
    return ~batch.packed.mask | unscorable


def _lengths(packed: Packed) -> torch.Tensor:
    return packed.cu_seqlens.diff()
