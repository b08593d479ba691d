"""Conformance of an advantage estimator: subclass, say how it is made, run with pytest.

class TestMine(AdvantageSuite):
    def make(self):
        return MyEstimator(MyEstimator.Config())
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from posttune.types import AdvantageBatch, Advantages, Traits

if TYPE_CHECKING:
    import torch

TOLERANCE = 2e-5


class AdvantageSuite:
    """What every estimator must do. A subclass may declare more of what its estimator does."""

    seeds = (0, 1, 2)
    shift_invariant = False  # adding a constant to all scores of a group changes nothing
    scaling: Literal["invariant", "equivariant"] | None = None  # what doubling all scores does
    constant_group_is_zero: bool | None = (
        None  # None: true of group estimators without statistics of the batch
    )

    def make(self) -> Any:
        """The plugin, configured."""
        raise NotImplementedError

    def bound(self, size: int) -> float | None:
        """The largest |A| in a group of ``size`` samples, where there is one."""

    def compute(self, batch: AdvantageBatch) -> Advantages:
        """One call of the hook."""
        result: Advantages = self.make().advantage_estimator_compute(batch=batch)
        return result

    def traits(self) -> Traits:
        """What the estimator says it needs."""
        found: Traits = self.make().advantage_estimator_traits()
        return found

    def batch(self, seed: int) -> AdvantageBatch:
        """A random batch with ragged lengths and holes. Override to give more structure."""
        from posttune.testing import _batches

        return _batches.random_advantage_batch(seed)

    def test_returns_masked_float32(self) -> None:
        """One finite float32 a token; 0 where the token is not the policy's."""
        import torch

        for seed in self.seeds:
            batch = self.batch(seed)
            result = self.compute(batch)
            given = [result.advantages] if result.returns is None else [result.advantages, result.returns]
            for tensor in given:
                assert tensor.shape == batch.packed.mask.shape
                assert tensor.dtype == torch.float32
                assert bool(tensor.isfinite().all())
                assert not bool(tensor[~batch.packed.mask].any())

    def test_leaves_its_input_alone_and_repeats(self) -> None:
        """The same input gives the same output, and is not written to."""
        import torch

        batch = self.batch(0)
        before = [tensor.clone() for tensor in _tensors(batch)]
        first, second = self.compute(batch), self.compute(batch)
        assert torch.equal(first.advantages, second.advantages)
        assert all(torch.equal(old, new) for old, new in zip(before, _tensors(batch), strict=True))

    def test_order_of_sequences_does_not_matter(self) -> None:
        """A permutation of the samples permutes the advantages."""
        import torch

        from posttune.testing import _batches

        for seed in self.seeds:
            batch = self.batch(seed)
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(len(batch.packed.group), generator=generator).tolist()
            places = _batches.places_of(batch.packed, order)
            moved = self.compute(_batches.pick_advantage(batch, places))
            _close(moved.advantages, self.compute(batch).advantages[places.tokens])

    def test_unscorable_sample_counts_for_nothing(self) -> None:
        """A NaN score gives 0 and leaves all others as if the sample were absent."""
        import math

        for seed in self.seeds:
            batch = self.batch(seed)
            scores = batch.scores.clone()
            scores[1] = math.nan
            self._expect_absent(replace(batch, scores=scores), 1)

    def test_empty_response_counts_for_nothing(self) -> None:
        """A response without a token of the policy, whatever its score, leaves all others alone."""
        import torch

        for seed in self.seeds:
            batch = self.batch(seed)
            start, end = batch.packed.cu_seqlens[1:3].tolist()
            mask, scores = batch.packed.mask.clone(), batch.scores.clone()
            mask[start:end] = False
            scores[1] = 1000.0
            rewards = torch.where(mask, batch.token_rewards, 0.0)
            layout = replace(batch.packed, mask=mask)
            self._expect_absent(replace(batch, packed=layout, scores=scores, token_rewards=rewards), 1)

    def _expect_absent(self, batch: AdvantageBatch, missing: int) -> None:
        from posttune.testing import _batches

        others = [place for place in range(len(batch.packed.group)) if place != missing]
        kept = _batches.places_of(batch.packed, others)
        gone = _batches.places_of(batch.packed, [missing])
        result = self.compute(batch).advantages
        assert not bool(result[gone.tokens].any())
        _close(result[kept.tokens], self.compute(_batches.pick_advantage(batch, kept)).advantages)

    def test_padding_does_not_matter(self) -> None:
        """Masked tokens before or after a response change nothing, whatever their value."""
        from posttune.testing import _batches

        batch = self.batch(0)
        expected = self.compute(batch).advantages
        for before, after in ((0, 3), (2, 0), (1, 2)):
            layout, now = _batches.padded(batch.packed, before, after)
            size = len(layout.mask)
            assert batch.values is not None
            wide = replace(
                batch,
                packed=layout,
                token_rewards=_batches.widen(batch.token_rewards, now, size),
                values=_batches.widen(batch.values, now, size, fill=99.0),
            )
            _close(self.compute(wide).advantages[now], expected)

    def test_any_hashable_names_a_group(self) -> None:
        """Negative numbers, tuples and None name groups as well as strings do."""
        batch = self.batch(0)
        names = dict(zip(dict.fromkeys(batch.packed.group), _NAMES, strict=False))
        layout = replace(batch.packed, group=tuple(names[old] for old in batch.packed.group))
        _close(self.compute(replace(batch, packed=layout)).advantages, self.compute(batch).advantages)

    def test_split_over_ranks(self) -> None:
        """Two ranks with whole groups each compute what one rank would, metrics included."""
        from posttune.testing import _batches

        for seed in self.seeds:
            batch = self.batch(seed)
            parts = [_batches.places_of(batch.packed, part) for part in _batches.halves(batch.packed)]
            results = _batches.on_ranks([self._on_rank(batch, part) for part in parts])
            whole = self.compute(batch)
            for part, result in zip(parts, results, strict=True):
                _close(result.advantages, whole.advantages[part.tokens])
                assert result.metrics.keys() == whole.metrics.keys()
                for name, value in whole.metrics.items():
                    assert abs(result.metrics[name] - value) < TOLERANCE, name

    def _on_rank(self, batch: AdvantageBatch, part: Any) -> Callable[[Any], Advantages]:
        from posttune.testing import _batches

        def work(reduce: Any) -> Advantages:
            return self.compute(replace(_batches.pick_advantage(batch, part), reduce=reduce))

        return work

    def test_very_small_batches(self) -> None:
        """One token, no token and no sequence at all are defined, and finite."""
        from posttune.testing import _batches

        scores = _full(1, 0.5)
        single = replace(_scored(scores), dims=dict.fromkeys(self.batch(0).dims, scores))
        nothing = replace(single, packed=replace(single.packed, mask=~single.packed.mask))
        empty = _batches.pick_advantage(single, _batches.places_of(single.packed, []))
        assert bool(self.compute(single).advantages.isfinite().all())
        assert self.compute(nothing).advantages.tolist() == [0.0]
        assert self.compute(empty).advantages.tolist() == []

    def test_constant_group_gives_exactly_zero(self) -> None:
        """Equal scores carry no signal: 0, not a rounding error divided by a small deviation."""
        traits = self.traits()
        expected = self.constant_group_is_zero
        if expected is None:
            expected = traits.needs_groups and traits.scope == "group"
        if not expected:
            return
        for value in (0.1, 0.3, 0.6, 0.7, 0.95, 1 / 3, -2.7, 1e6 + 0.1, 1e-8):
            for size in (2, 3, 5, 7, 8, 11, 16, 33):
                scores = _full(size, value)
                batch = replace(_scored(scores), dims=dict.fromkeys(self.batch(0).dims, scores))
                assert not bool(self.compute(batch).advantages.any()), (value, size)

    def test_shift_and_scale_of_rewards(self) -> None:
        """What the subclass declares about a shift and a doubling of all scores."""
        for seed in self.seeds:
            batch = self.batch(seed)
            expected = self.compute(batch).advantages
            if self.shift_invariant:
                _close(self.compute(_mapped(batch, 1.0, 5.0)).advantages, expected, 1e-4)
            if self.scaling:
                factor = 1.0 if self.scaling == "invariant" else 2.0
                _close(self.compute(_mapped(batch, 2.0, 0.0)).advantages, factor * expected, 1e-4)

    def test_bound(self) -> None:
        """The declared bound of |A|, where one sample stands out by far."""
        for size in (2, 3, 8, 33):
            bound = self.bound(size)
            if bound is None:
                return
            for value, other in ((0.0, 0.95), (1.0, 0.0), (0.7 + 1.2e-16, 0.7), (1e9, 1.0)):
                scores = _full(size, other)
                scores[0] = value
                largest = float(self.compute(_scored(scores)).advantages.abs().max())
                assert largest <= bound * (1 + 1e-6)


_NAMES = (-7, ("a", 1), None, "x", 2**70, frozenset({3}), 0.5, b"bytes")


def _full(size: int, value: float) -> torch.Tensor:
    import torch

    return torch.full((size,), value, dtype=torch.float64)


def _scored(scores: torch.Tensor) -> AdvantageBatch:
    """One group of answers of one token each."""
    from posttune.testing import _batches

    layout = _batches.packed([1] * len(scores), ["only"] * len(scores))
    return AdvantageBatch(layout, scores, scores, {}, scores.float(), scores, _batches.one_rank)


def _tensors(batch: AdvantageBatch) -> list[torch.Tensor]:
    optional = [each for each in (batch.values, batch.baselines) if each is not None]
    layout = [batch.packed.cu_seqlens, batch.packed.mask]
    return [batch.token_rewards, batch.scores, *batch.dims.values(), *optional, *layout]


def _mapped(batch: AdvantageBatch, factor: float, shift: float) -> AdvantageBatch:
    dims = {name: factor * values + shift for name, values in batch.dims.items()}
    rewards = factor * batch.token_rewards
    return replace(batch, scores=factor * batch.scores + shift, token_rewards=rewards, dims=dims)


def _close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.shape == expected.shape
    if len(found):
        gap = (found - expected).abs() / expected.abs().clamp(min=1.0)
        assert float(gap.max()) <= tolerance, f"differs by {float(gap.max())}"
