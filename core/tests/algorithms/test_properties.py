"""Properties of estimators, losses and aggregations on generated batches (hypothesis)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from posttune import _segments as segments
from posttune.advantage import functions
from posttune.loss import functions as losses
from posttune.loss.aggregate import MODES, aggregate, count
from posttune.testing import _batches
from posttune.types import AdvantageBatch, Advantages, LossBatch, TokenLoss, Totals
from torch import Tensor

pytestmark = pytest.mark.slow

QUICK = settings(max_examples=25, deadline=None, derandomize=True, database=None)

# Rewards that people give: right or wrong, partial credit, a length penalty, something unscorable.
reward = st.one_of(
    st.sampled_from([0.0, 1.0, 0.1, 0.6, 0.7, 0.95, -0.5]),
    st.floats(-1e3, 1e3, allow_subnormal=False).map(lambda value: round(value, 6)),
)
score = st.one_of(reward, st.just(math.nan))


@dataclass(frozen=True)
class Drawn:
    """Sequences as hypothesis draws them: (group, score, mask of each token)."""

    sequences: list[tuple[int, float, list[bool]]]

    def batch(self, seed: int = 0) -> AdvantageBatch:
        masks = [mask for _, _, mask in self.sequences]
        flat = torch.tensor([token for mask in masks for token in mask], dtype=torch.bool)
        layout = _batches.packed(
            [len(mask) for mask in masks], [group for group, _, _ in self.sequences], flat
        )
        generator = torch.Generator().manual_seed(seed)
        scores = torch.tensor([score for _, score, _ in self.sequences], dtype=torch.float64)
        noise = torch.randn(len(flat), generator=generator, dtype=torch.float64)
        return AdvantageBatch(
            packed=layout,
            token_rewards=torch.where(flat, noise, 0.0),
            scores=scores,
            dims={"a": scores, "b": torch.where(scores.isnan(), scores, scores.cos())},
            values=torch.randn(len(flat), generator=generator),
            baselines=torch.randn(len(scores), generator=generator).double(),
            reduce=_batches.one_rank,
        )


def drawn(scores: st.SearchStrategy[float] = score) -> st.SearchStrategy[Drawn]:
    mask = st.lists(st.booleans(), max_size=5)
    return st.lists(st.tuples(st.integers(0, 3), scores, mask), max_size=12).map(Drawn)


ESTIMATORS: dict[str, Callable[[AdvantageBatch], Advantages]] = {
    "gae": lambda batch: functions.gae(batch, gamma=0.9, lam=0.8),
    "grpo": functions.grpo,
    "grpo batch": lambda batch: functions.grpo(batch, scale="batch"),
    "dr_grpo": lambda batch: functions.grpo(batch, scale="none"),
    "rloo": functions.rloo,
    "reinforce_plus_plus": lambda batch: functions.reinforce_plus_plus(batch, gamma=0.9),
    "reinforce_plus_plus_baseline": functions.reinforce_plus_plus_baseline,
    "remax": functions.remax,
    "opo": functions.opo,
    "gpg": functions.gpg,
    "grpo_passk": functions.grpo_passk,
    "gdpo": functions.gdpo,
}
estimators = pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)


def near(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    assert found.shape == expected.shape
    if found.numel():
        assert float(((found - expected).abs() / expected.abs().clamp(min=1)).max()) <= tolerance


@estimators
@QUICK
@given(case=drawn())
def test_estimators_are_total(estimator: Callable[[AdvantageBatch], Advantages], case: Drawn) -> None:
    """Finite everywhere, 0 at masked tokens and for unscorable samples, whatever the batch."""
    batch = case.batch()
    result = estimator(batch)
    unscorable = segments.spread(batch.scores.isnan(), batch.packed)
    assert bool(result.advantages.isfinite().all())
    assert not bool(result.advantages[~batch.packed.mask | unscorable].any())


@estimators
@QUICK
@given(case=drawn(), data=st.data())
def test_permutation(
    estimator: Callable[[AdvantageBatch], Advantages], case: Drawn, data: st.DataObject
) -> None:
    batch = case.batch()
    order = data.draw(st.permutations(range(len(case.sequences))))
    places = _batches.places_of(batch.packed, order)
    moved = estimator(_batches.pick_advantage(batch, places)).advantages
    near(moved, estimator(batch).advantages[places.tokens])


@estimators
@QUICK
@given(case=drawn())
def test_split_over_ranks(estimator: Callable[[AdvantageBatch], Advantages], case: Drawn) -> None:
    """Whole groups on two ranks, one of which may be empty."""
    batch = case.batch()
    inside = [place for place, (group, _, _) in enumerate(case.sequences) if group < 2]
    outside = [place for place, (group, _, _) in enumerate(case.sequences) if group >= 2]
    parts = [_batches.places_of(batch.packed, part) for part in (inside, outside)]

    def work(part: _batches.Places) -> Callable[[Callable[[Tensor], Tensor]], Advantages]:
        return lambda reduce: estimator(replace(_batches.pick_advantage(batch, part), reduce=reduce))

    whole = estimator(batch)
    for part, result in zip(parts, _batches.on_ranks([work(part) for part in parts]), strict=True):
        near(result.advantages, whole.advantages[part.tokens])
        assert result.metrics == pytest.approx(whole.metrics)


@estimators
@QUICK
@given(case=drawn(), before=st.integers(0, 3), after=st.integers(0, 3))
def test_padding(
    estimator: Callable[[AdvantageBatch], Advantages], case: Drawn, before: int, after: int
) -> None:
    """A padded rectangle is masked tokens on one side or the other: neither matters."""
    batch = case.batch()
    layout, now = _batches.padded(batch.packed, before, after)
    assert batch.values is not None
    wide = replace(
        batch,
        packed=layout,
        token_rewards=_batches.widen(batch.token_rewards, now, len(layout.mask)),
        values=_batches.widen(batch.values, now, len(layout.mask), fill=1e6),
    )
    near(estimator(wide).advantages[now], estimator(batch).advantages, 1e-5)


@QUICK
@given(
    scores=st.lists(st.one_of(reward, st.floats(-1e9, 1e9)), min_size=2, max_size=40),
    eps=st.sampled_from([0.0, 1e-12, 1e-6, 1e-4]),
)
def test_bound_of_group_normalisation(scores: list[float], eps: float) -> None:
    """|A| <= (n - 1) / sqrt(n) for ddof 1."""
    result = functions.grpo(Drawn([(0, value, [True]) for value in scores]).batch(), eps=eps)
    size = len(scores)
    assert float(result.advantages.abs().max()) <= (size - 1) / math.sqrt(size) * (1 + 1e-6)


@QUICK
@given(
    scores=st.lists(reward, min_size=2, max_size=8),
    shift=st.floats(-100, 100),
    factor=st.floats(0.01, 100),
)
def test_shift_and_scale_of_rewards(scores: list[float], shift: float, factor: float) -> None:
    """Normalised: neither matters; centred: a shift does not, and a factor comes out in front."""
    batch = Drawn([(0, value, [True]) for value in scores]).batch()
    moved = replace(batch, scores=batch.scores * factor + shift)
    if float(batch.scores.std()) > 1e-3:
        near(functions.grpo(moved, eps=0.0).advantages, functions.grpo(batch, eps=0.0).advantages)
    for centred in (ESTIMATORS["dr_grpo"], ESTIMATORS["rloo"], ESTIMATORS["opo"]):
        near(centred(moved).advantages, factor * centred(batch).advantages)


@QUICK
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), discount=st.floats(0, 1), data=st.data())
def test_suffix_sums_are_the_plain_recursion(
    lengths: list[int], discount: float, data: st.DataObject
) -> None:
    values = data.draw(st.lists(st.floats(-10, 10), min_size=sum(lengths), max_size=sum(lengths)))
    layout = _batches.packed(lengths, range(len(lengths)))
    found = segments.suffix_sums(torch.tensor(values, dtype=torch.float64), layout.cu_seqlens, discount)
    expected, ends = [0.0] * len(values), set(layout.cu_seqlens.tolist())
    for place in reversed(range(len(values))):
        after = 0.0 if place + 1 in ends else expected[place + 1]
        expected[place] = values[place] + discount * after
    near(found, torch.tensor(expected, dtype=torch.float64), 1e-9)


LOSSES: dict[str, Callable[[LossBatch], TokenLoss]] = {
    "ppo_clip": losses.ppo_clip,
    "gspo": lambda batch: losses.ppo_clip(batch, level="sequence", dual=None),
    "cispo": losses.cispo,
    "sapo": losses.sapo,
    "geo_mean": losses.geo_mean,
    "dppo_tv": losses.dppo_tv,
    "dppo_kl": losses.dppo_kl,
    "gpg": losses.gpg,
    "vespo": losses.vespo,
}


def loss_batch(case: Drawn, seed: int) -> LossBatch:
    layout = case.batch().packed
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(len(layout.mask), generator=generator) - 0.05
    advantages = torch.randn(len(layout.group), generator=generator)
    shift = 0.5 * torch.randn(len(layout.mask), generator=generator)
    return LossBatch(layout, (old + shift).clamp(max=-0.01), old, None, segments.spread(advantages, layout))


def loss_and_gradient(
    function: Callable[[LossBatch], TokenLoss], batch: LossBatch, mode: str, totals: Totals
) -> tuple[float, Tensor]:
    logp = batch.logp.clone().requires_grad_()
    value = aggregate(function(replace(batch, logp=logp)).loss, batch.packed, mode, totals)
    (grad,) = torch.autograd.grad(value, logp)
    return value.item(), grad


@pytest.mark.parametrize("function", LOSSES.values(), ids=LOSSES)
@QUICK
@given(case=drawn(), mode=st.sampled_from(MODES), seed=st.integers(0, 99), data=st.data())
def test_split_over_micro_batches(
    function: Callable[[LossBatch], TokenLoss], case: Drawn, mode: str, seed: int, data: st.DataObject
) -> None:
    """Any partition, in any order: the parts' losses and gradients add up to the whole's."""
    batch = loss_batch(case, seed)
    labels = [data.draw(st.integers(0, 3)) for _ in case.sequences]
    order = data.draw(st.permutations(range(len(labels))))
    totals = count(batch.packed)
    value, grad = loss_and_gradient(function, batch, mode, totals)
    total, pieces = 0.0, torch.zeros_like(grad)
    for label in range(4):
        places = _batches.places_of(batch.packed, [each for each in order if labels[each] == label])
        share, piece = loss_and_gradient(function, _batches.pick_loss(batch, places), mode, totals)
        total += share
        pieces[places.tokens] = piece
    assert total == pytest.approx(value, rel=1e-4, abs=1e-5)
    near(pieces, grad)


@QUICK
@given(case=drawn(), mode=st.sampled_from(MODES), seed=st.integers(0, 99))
def test_packed_is_padded(case: Drawn, mode: str, seed: int) -> None:
    """The packed aggregation agrees with one written for padded rectangles."""
    batch = loss_batch(case, seed)
    size = segments.lengths(batch.packed.cu_seqlens).tolist()
    width = max([*size, 1])
    values = torch.randn(len(batch.packed.mask), generator=torch.Generator().manual_seed(seed))
    rows = [list(part) for part in values.split(size)] if size else []
    masks = [list(part) for part in batch.packed.mask.split(size)] if size else []
    matrix = torch.tensor([[*row, *[99.0] * (width - len(row))] for row in rows]).reshape(-1, width)
    mask = torch.tensor([[*row, *[False] * (width - len(row))] for row in masks]).reshape(-1, width)
    kept = torch.where(mask.bool(), matrix, 0.0)
    tokens = mask.sum(1)
    sequences = max(int((tokens > 0).sum()), 1)
    expected = {
        "token_mean": kept.sum() / max(int(tokens.sum()), 1),
        "token_sum": kept.sum(),
        "seq_mean_token_sum": kept.sum() / sequences,
        "seq_mean_token_sum_norm": kept.sum() / sequences / width,
        "seq_mean_token_mean": (kept.sum(1) / tokens.clamp(min=1)).sum() / sequences,
    }[mode]
    found = aggregate(values, batch.packed, mode, replace(count(batch.packed), max_length=width))
    assert found.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-5)
