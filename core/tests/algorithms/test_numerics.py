"""The tables of NUMERICS.md that the gold cases do not hold, number by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from posttune.advantage import functions
from posttune.advantage.whiten import whiten
from posttune.loss import functions as losses
from posttune.loss.aggregate import aggregate, count
from posttune.loss.kl import kl_terms
from posttune.testing._batches import one_rank, packed
from posttune.types import AdvantageBatch, LossBatch, Totals
from torch import Tensor


def batch_of(
    scores: Sequence[float], groups: Sequence[object], lengths: Sequence[int] | None = None
) -> AdvantageBatch:
    layout = packed(lengths or [1] * len(scores), [str(group) for group in groups])
    tensor = torch.tensor(scores, dtype=torch.float64)
    ends = layout.cu_seqlens[1:].long() - 1
    rewards = torch.zeros(len(layout.mask), dtype=torch.float64).index_put((ends,), tensor)
    return AdvantageBatch(layout, rewards, tensor, {}, None, None, one_rank)


def rows(rewards: list[list[float]], values: list[list[float]], mask: list[list[int]]) -> AdvantageBatch:
    flat = torch.tensor(mask).flatten() > 0
    layout = packed([len(row) for row in mask], list(range(len(mask))), flat)
    token_rewards = torch.tensor(rewards, dtype=torch.float64).flatten()
    scores = torch.tensor(rewards, dtype=torch.float64).sum(1)
    return AdvantageBatch(layout, token_rewards, scores, {}, torch.tensor(values).flatten(), None, one_rank)


def close(found: Tensor, expected: Sequence[float], tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(
        found.double(), torch.tensor(expected, dtype=torch.float64), atol=tolerance, rtol=0
    )


HOLE = rows([[0, 0, 0, 1]], [[0.1, 0.2, 0.3, 0.4]], [[1, 1, 0, 1]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("carry", [0.81306, 0.76030, 0.6]),  # verl, AReaL, NeMo-RL
        ("plain", [0.77329, 0.71801, 0.6]),  # TRL, SkyRL
        ("zero", [0.75932, 0.70316, 0.6]),  # OpenRLHF
    ],
)
def test_gae_over_a_hole(mode: functions.MaskMode, expected: list[float]) -> None:
    result = functions.gae(HOLE, gamma=0.99, lam=0.95, mask_mode=mode, whiten=False)
    close(result.advantages[HOLE.packed.mask], expected)
    assert result.advantages[2] == 0


def test_gae_of_two_rows() -> None:
    batch = rows(
        [[0, 0, 0, 1], [0, 0.5, 0, 0]],
        [[0.1, 0.2, 0.3, 0.4], [0.5, 0.4, 0.3, 0.2]],
        [[1, 1, 0, 1], [1, 1, 0, 0]],
    )
    result = functions.gae(batch, gamma=0.99, lam=0.95)
    close(result.advantages, [0.942658, 0.804646, 0, 0.385344, -1.210124, -0.922524, 0, 0])
    assert result.returns is not None
    close(result.returns, [0.913062, 0.96030, 0, 1.0, 0.490050, 0.5, 0, 0])


@pytest.mark.parametrize(("ddof", "large", "small"), [(1, 1.161895, 0.387298), (0, 1.341641, 0.447214)])
def test_whitening_of_one_to_four(ddof: int, large: float, small: float) -> None:
    values, mask = torch.tensor([1.0, 2, 3, 4]), torch.ones(4, dtype=torch.bool)
    close(whiten(values, mask, one_rank, ddof=ddof), [-large, -small, small, large])


SCORES, IDS = [1, 0, 0, 0.7, 0.7, 2], ["a", "a", "a", "b", "b", "c"]


def test_group_baselines_as_verl() -> None:
    batch = batch_of(SCORES, IDS)
    close(
        functions.grpo(batch, singleton="raw").advantages,
        [1.154698, -0.577349, -0.577349, 0, 0, 1.999998],
    )
    no_std = [0.666667, -0.333333, -0.333333, 0, 0, 2]
    close(functions.grpo(batch, scale="none", singleton="raw").advantages, no_std)
    close(functions.opo(batch, singleton="raw").advantages, no_std)
    close(functions.rloo(batch, singleton="raw").advantages, [1, -0.5, -0.5, 0, 0, 2])
    close(functions.rloo(batch, singleton="zero").advantages, [1, -0.5, -0.5, 0, 0, 0])
    close(functions.gpg(batch, singleton="raw").advantages, [1, -0.5, -0.5, 0, 0, 3])
    wide = batch_of(SCORES, IDS, lengths=[3] * 6)  # the whitening counts tokens
    close(
        functions.reinforce_plus_plus_baseline(wide, singleton="raw").advantages[::3],
        [0.396746, -0.793492, -0.793492, -0.396746, -0.396746, 1.983730],
    )


def test_group_baselines_as_trl() -> None:
    batch = batch_of([1, 0, 0, 0.7, 0.7, 0.2], ["a", "a", "a", "b", "b", "b"])
    close(
        functions.grpo(batch, eps=1e-4).advantages,
        [1.154500, -0.577250, -0.577250, 0.577150, 0.577150, -1.154301],
    )


def test_opo_weighs_by_length() -> None:
    batch = batch_of([1.0, 0.0], ["a", "a"], lengths=[3, 1])
    close(functions.opo(batch).advantages, [0.25, 0.25, 0.25, -0.75])


LOGP = [-0.5, -2.5, -1.05, -0.9, -1.2]


def loss_batch(logp: Sequence[float] = LOGP, advantages: Sequence[float] = (1, 1, 1, -1, -1)) -> LossBatch:
    layout = packed([3, 2], ["a", "b"]) if len(logp) == 5 else packed([len(logp)], ["a"])
    tensor = torch.tensor(logp, dtype=torch.float64)
    old = torch.full_like(tensor, -1.0)
    return LossBatch(layout, tensor, old, None, torch.tensor(advantages, dtype=torch.float64))


TOTALS = Totals(tokens=5, sequences=2, max_length=4)  # of the padded fixture


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", -0.1060916),
        ("seq_mean_token_mean", 0.0719155),
        ("seq_mean_token_sum_norm", -0.0663072),
        ("seq_mean_token_sum", -0.2652289),
    ],
)
def test_clipped_loss_by_aggregation(mode: str, expected: float) -> None:
    batch = loss_batch()
    found = losses.ppo_clip(batch, low=0.2, high=0.28, dual=None).loss
    assert aggregate(found, batch.packed, mode, TOTALS).item() == pytest.approx(expected, abs=1e-6)


def test_other_losses() -> None:
    batch = loss_batch()
    clip = {"low": 0.2, "high": 0.28}
    found = {
        "gspo": (losses.ppo_clip(batch, low=0.2, high=0.28, dual=None, level="sequence"), 0.1232707),
        "sapo": (losses.sapo(batch), -0.0395519),
        "geo_mean": (losses.geo_mean(batch, **clip), 0.1481846),
    }
    for name, (result, expected) in found.items():
        value = aggregate(result.loss, batch.packed, "seq_mean_token_mean", TOTALS).item()
        assert value == pytest.approx(expected, abs=1e-6), name
    by_token = {
        "cispo verl": (losses.cispo(batch, low=0.2, high=0.28), 0.3323320),
        "cispo trl": (losses.cispo(batch, high=0.28, bounds="absolute"), 0.0807651),
        "dppo_tv": (losses.dppo_tv(batch, **clip), 0.0807692),
        "dppo_kl": (losses.dppo_kl(batch, **clip), 0.0807692),
        "vespo": (losses.vespo(batch), 0.3209311),
        "gpg": (losses.gpg(batch), 0.39),
    }
    for name, (result, expected) in by_token.items():
        value = aggregate(result.loss, batch.packed, "token_mean", TOTALS).item()
        assert value == pytest.approx(expected, abs=1e-6), name


@pytest.mark.parametrize(("dual", "expected"), [(None, 3.45), (3.0, 1.70), (1.5, 1.20)])
def test_dual_clip(dual: float | None, expected: float) -> None:
    ratios = torch.tensor([10.0, 2, 0.5, 1], dtype=torch.float64)
    batch = loss_batch((ratios.log() - 1).tolist(), [-1.0] * 4)
    batch = replace(batch, logp=batch.logp.requires_grad_())
    loss = losses.ppo_clip(batch, low=0.2, high=0.28, dual=dual).loss
    assert loss.mean().item() == pytest.approx(expected, abs=1e-6)
    (grad,) = torch.autograd.grad(loss.sum(), batch.logp)
    capped = dual is not None and dual < 10
    assert (grad[0] == 0) == capped


def test_aggregations_of_three_rows() -> None:
    layout = packed([3, 1, 0], ["a", "b", "c"])
    values = torch.tensor([1.0, 2, 3, 4])
    totals = replace(count(layout), max_length=4)
    expected = {
        "token_mean": 2.5,
        "token_sum": 10.0,
        "seq_mean_token_sum": 5.0,
        "seq_mean_token_sum_norm": 1.25,
        "seq_mean_token_mean": 3.0,
    }
    assert {mode: aggregate(values, layout, mode, totals).item() for mode in expected} == expected
    assert aggregate(values, layout, "seq_mean_token_sum_norm", totals, loss_scale=10).item() == 0.5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k1", 1.0),
        ("k2", 0.5),
        ("k3", 0.3935),
        ("k1+", 0.5),
        ("k3+", 0.5),
        ("k2+", 0.5),
        ("abs", 1.0),
        ("abs+", 0.5),
    ],
)
def test_gradient_of_each_kl_estimator_at_half(name: str, expected: float) -> None:
    logp = torch.tensor([-0.5], dtype=torch.float64, requires_grad=True)
    value = kl_terms(logp, torch.tensor([-1.0], dtype=torch.float64), name)
    (grad,) = torch.autograd.grad(value.sum(), logp)
    assert grad.item() == pytest.approx(expected, abs=1e-4)
