"""Conformance of a policy loss: subclass, say how it is made, run with pytest.

class TestMine(LossSuite):
    def make(self):
        return MyLoss(MyLoss.Config())
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from posttune.types import LossBatch, LossTraits, TokenLoss, Totals

if TYPE_CHECKING:
    import torch

MODES = ("token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_sum_norm", "seq_mean_token_mean")
TOLERANCE = 2e-5


class LossSuite:
    """What every policy loss must do. A subclass may declare more of what its loss does."""

    seeds = (0, 1, 2)
    on_policy_gradient = True  # where pi = pi_old, the gradient by log pi is -A

    def make(self) -> Any:
        """The plugin, configured."""
        raise NotImplementedError

    def compute(self, batch: LossBatch) -> TokenLoss:
        """One call of the hook."""
        result: TokenLoss = self.make().policy_loss_compute(batch=batch)
        return result

    def traits(self) -> LossTraits:
        """What the loss says it is."""
        found: LossTraits = self.make().policy_loss_traits()
        return found

    def batch(self, seed: int) -> LossBatch:
        """A random batch with ragged lengths, holes, and ratios far enough from 1 to be clipped."""
        from posttune.testing import _batches

        return _batches.random_loss_batch(seed)

    def gradient(self, batch: LossBatch, mode: str, totals: Totals) -> tuple[float, torch.Tensor]:
        """The aggregated loss of a batch, and its gradient by the log-probabilities."""
        import torch

        from posttune.loss.aggregate import aggregate

        logp = batch.logp.detach().clone().requires_grad_()
        result = self.compute(replace(batch, logp=logp))
        value = aggregate(result.loss, batch.packed, mode, totals)
        (grad,) = torch.autograd.grad(value, logp)
        return value.item(), grad

    def test_traits_name_an_aggregation(self) -> None:
        """The default aggregation is one that exists."""
        assert self.traits().aggregation in MODES

    def test_returns_one_value_a_token(self) -> None:
        """Unreduced, finite, in the type of its input; metrics are sums and counts."""
        for seed in self.seeds:
            batch = self.batch(seed)
            result = self.compute(batch)
            assert result.loss.shape == batch.logp.shape
            assert result.loss.dtype == batch.logp.dtype
            assert bool(result.loss.isfinite().all())
            for total, count in result.metrics.values():
                assert total.dim() == count.dim() == 0
                assert not total.requires_grad
                assert bool(total.isfinite())

    def test_masked_tokens_have_no_gradient(self) -> None:
        """Whatever they hold: NaN and infinity at masked tokens reach neither value nor gradient."""
        import math

        import torch

        from posttune.loss.aggregate import count

        batch = self.batch(0)
        mask = batch.packed.mask
        for garbage in (math.nan, math.inf, -math.inf, 80.0):
            dirty = replace(
                batch,
                logp=torch.where(mask, batch.logp, garbage),
                old_logp=torch.where(mask, batch.old_logp, -garbage),
                advantages=torch.where(mask, batch.advantages, garbage),
            )
            for mode in ("token_mean", "seq_mean_token_mean"):
                value, grad = self.gradient(dirty, mode, count(batch.packed))
                clean, expected = self.gradient(batch, mode, count(batch.packed))
                assert not bool(grad[~mask].any())
                assert abs(value - clean) <= TOLERANCE * max(1.0, abs(clean))
                _close(grad, expected)

    def test_no_advantage_no_gradient(self) -> None:
        """Where all advantages are 0 nothing is learnt; the traits say whether that may be relied on."""
        import torch

        from posttune.loss.aggregate import count

        if not self.traits().advantage_only:
            return
        batch = replace(self.batch(0), advantages=torch.zeros_like(self.batch(0).advantages))
        value, grad = self.gradient(batch, "token_sum", count(batch.packed))
        assert value == 0
        assert not bool(grad.any())

    def test_on_policy_gradient(self) -> None:
        """The policy gradient: -A at every token of the policy."""
        from posttune.loss.aggregate import count
        from posttune.testing import _batches

        if not self.on_policy_gradient:
            return
        for seed in self.seeds:
            batch = _batches.random_loss_batch(seed, on_policy=True)
            batch = replace(batch, logp=batch.old_logp.clone())
            _, grad = self.gradient(batch, "token_sum", count(batch.packed))
            _close(grad, -batch.advantages)

    def test_order_of_sequences_does_not_matter(self) -> None:
        """A permutation of the sequences permutes losses and gradients."""
        import torch

        from posttune.loss.aggregate import count
        from posttune.testing import _batches

        for seed in self.seeds:
            batch = self.batch(seed)
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(len(batch.packed.group), generator=generator).tolist()
            places = _batches.places_of(batch.packed, order)
            moved = _batches.pick_loss(batch, places)
            for mode in MODES:
                value, grad = self.gradient(batch, mode, count(batch.packed))
                other, moved_grad = self.gradient(moved, mode, count(batch.packed))
                assert abs(value - other) <= TOLERANCE * max(1.0, abs(value))
                _close(moved_grad, grad[places.tokens])

    def test_split_over_micro_batches(self) -> None:
        """Under global totals, the parts add up to the whole: loss, gradient and metrics."""
        import torch

        from posttune.loss.aggregate import count
        from posttune.testing import _batches

        batch = self.batch(0)
        totals = count(batch.packed)
        for mode in MODES:
            value, grad = self.gradient(batch, mode, totals)
            for size in (1, 5):
                total, pieces = 0.0, torch.zeros_like(grad)
                for part in _batches.micro_batches(len(batch.packed.group), size):
                    places = _batches.places_of(batch.packed, part)
                    share, piece = self.gradient(_batches.pick_loss(batch, places), mode, totals)
                    total += share
                    pieces[places.tokens] = piece
                assert abs(total - value) <= TOLERANCE * max(1.0, abs(value))
                _close(pieces, grad)

    def test_metrics_add_up(self) -> None:
        """Sums and counts of micro-batches add up to those of the batch."""
        from posttune.testing import _batches

        batch = self.batch(0)
        whole = self.compute(batch).metrics
        totals = {name: [0.0, 0.0] for name in whole}
        for part in _batches.micro_batches(len(batch.packed.group), 3):
            piece = self.compute(_batches.pick_loss(batch, _batches.places_of(batch.packed, part))).metrics
            for name, (total, count) in piece.items():
                totals[name][0] += float(total)
                totals[name][1] += float(count)
        for name, (total, count) in whole.items():
            assert abs(totals[name][0] - float(total)) <= 1e-4 * max(1.0, abs(float(total))), name
            assert totals[name][1] == float(count), name

    def test_padding_does_not_matter(self) -> None:
        """Masked tokens before or after a response change neither loss nor gradient."""
        from posttune.loss.aggregate import count
        from posttune.testing import _batches

        batch = self.batch(0)
        totals = count(batch.packed)
        for before, after in ((0, 3), (2, 0), (1, 2)):
            layout, now = _batches.padded(batch.packed, before, after)
            wide = LossBatch(
                packed=layout,
                logp=_batches.widen(batch.logp, now, len(layout.mask), fill=-1.0),
                old_logp=_batches.widen(batch.old_logp, now, len(layout.mask), fill=-2.0),
                rollout_logp=None,
                advantages=_batches.widen(batch.advantages, now, len(layout.mask)),
            )
            for mode in MODES:
                value, grad = self.gradient(batch, mode, totals)
                other, wide_grad = self.gradient(wide, mode, totals)
                assert abs(value - other) <= TOLERANCE * max(1.0, abs(value))
                _close(wide_grad[now], grad)

    def test_extreme_ratios_are_finite(self) -> None:
        """A token that became e^60 times more or less likely leaves loss and gradient finite."""
        from posttune.loss.aggregate import count

        for shift in (60.0, -60.0):
            batch = self.batch(0)
            far = replace(batch, old_logp=batch.logp - shift)
            value, grad = self.gradient(far, "token_mean", count(batch.packed))
            assert abs(value) < float("inf")
            assert bool(grad.isfinite().all())

    def test_fully_masked_batch_is_zero(self) -> None:
        """Not NaN, in every aggregation; and so is a batch without a sequence."""
        from posttune.loss.aggregate import count
        from posttune.testing import _batches

        batch = self.batch(0)
        masked = replace(batch, packed=replace(batch.packed, mask=batch.packed.mask & False))
        empty = _batches.pick_loss(batch, _batches.places_of(batch.packed, []))
        for mode in MODES:
            for each in (masked, empty):
                value, grad = self.gradient(each, mode, count(each.packed))
                assert value == 0
                assert not bool(grad.any())


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    if len(found):
        gap = (found - expected).abs() / expected.abs().clamp(min=1.0)
        assert float(gap.max()) <= TOLERANCE, f"differs by {float(gap.max())}"
