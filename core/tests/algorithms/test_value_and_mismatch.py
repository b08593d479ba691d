"""The critic's loss, explained variance, entropy, and the gap between trainer and rollout."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from posttune.loss.entropy import entropy
from posttune.loss.mismatch import Gap, gap, importance_weights
from posttune.loss.value import explained_variance, value_loss
from posttune.testing._batches import on_ranks, one_rank, packed
from posttune.types import Reduce

MASK = torch.tensor([True, True, False])


def test_value_loss_takes_the_worse_of_clipped_and_unclipped() -> None:
    values, old, returns = (torch.tensor([*pair, math.nan]) for pair in ([0.5, 1.0], [0.0, 0.9], [1.0, 0.0]))
    result = value_loss(values, old, returns, MASK, clip=0.2)
    torch.testing.assert_close(result.loss, torch.tensor([0.32, 0.5, 0.0]))
    assert [int(each) for each in result.metrics["value/clip_fraction"]] == [1, 2]
    unclipped = value_loss(values, old, returns, MASK, clip=None)
    torch.testing.assert_close(unclipped.loss, torch.tensor([0.125, 0.5, 0.0]))


def test_explained_variance() -> None:
    returns = torch.tensor([1.0, 3.0, 77.0])
    assert explained_variance(returns, returns, MASK, one_rank) == 1.0
    assert explained_variance(torch.full((3,), 2.0), returns, MASK, one_rank) == 0.0
    assert explained_variance(-returns, returns, MASK, one_rank) == -3.0
    assert explained_variance(returns, torch.ones(3), MASK, one_rank) == 0.0


def test_explained_variance_is_global() -> None:
    generator = torch.Generator().manual_seed(0)
    values, returns = torch.randn(2, 10, generator=generator)
    mask = torch.ones(10, dtype=torch.bool)

    def work(part: slice) -> Callable[[Reduce], float]:
        return lambda reduce: explained_variance(values[part], returns[part], mask[part], reduce)

    found = on_ranks([work(slice(0, 3)), work(slice(3, 10))])
    whole = explained_variance(values, returns, mask, one_rank)
    assert found == [pytest.approx(whole)] * 2


def test_entropy_of_known_distributions() -> None:
    assert entropy(torch.tensor([1.0, 2.0, 3.0])).item() == pytest.approx(0.8323955, abs=1e-6)
    assert entropy(torch.zeros(2, 7)).tolist() == pytest.approx([math.log(7)] * 2)
    assert entropy(torch.tensor([0.0, -math.inf, 0.0])).item() == pytest.approx(math.log(2))
    assert entropy(torch.zeros(4, dtype=torch.bfloat16)).dtype == torch.float32


def test_gap_adds_up_over_parts() -> None:
    trainer, rollout = torch.tensor([-1.0, -2.0, -3.0, math.nan]), torch.tensor([-1.5, -2.0, -2.0, 0.0])
    mask = torch.tensor([True, True, True, False])
    whole = gap(trainer, rollout, mask)
    parts = gap(trainer[:1], rollout[:1], mask[:1]) + gap(trainer[1:], rollout[1:], mask[1:])
    metrics = whole.metrics()
    assert parts.metrics() == pytest.approx(metrics)
    weights = [math.exp(0.5), 1.0, math.exp(-1.0)]
    assert metrics == pytest.approx(
        {
            "rollout/logprob_gap_mean": 0.5,
            "rollout/logprob_gap_max": 1.0,
            "rollout/effective_sample_size": sum(weights) ** 2 / (3 * sum(weight**2 for weight in weights)),
        }
    )


def test_gap_of_equal_log_probabilities_and_of_nothing() -> None:
    logp = torch.tensor([-1.0, -2.0, -0.5])
    assert gap(logp, logp, MASK).metrics() == {
        "rollout/logprob_gap_mean": 0.0,
        "rollout/logprob_gap_max": 0.0,
        "rollout/effective_sample_size": 1.0,
    }
    assert gap(logp, logp, MASK & False) == Gap()
    assert Gap().metrics() == {}


LAYOUT = packed([2, 2], ["a", "b"], torch.tensor([True, True, True, False]))
ROLLOUT = torch.tensor([-1.0, -1.0, -1.0, -1.0])
TRAINER = torch.tensor([-1 + math.log(3.0), -1 + math.log(0.5), -1 + math.log(1.2), math.nan])


@pytest.mark.parametrize(
    ("level", "mode", "expected"),
    [
        ("token", "truncate", [2.0, 0.5, 1.2, 0.0]),
        ("token", "mask", [0.0, 0.5, 1.2, 0.0]),
        ("sequence", "truncate", [1.5, 1.5, 1.2, 0.0]),
        ("geometric", "truncate", [math.sqrt(1.5), math.sqrt(1.5), 1.2, 0.0]),
    ],
)
def test_importance_weights(level: str, mode: str, expected: list[float]) -> None:
    found = importance_weights(TRAINER, ROLLOUT, LAYOUT, level=level, mode=mode, cap=2.0)  # type: ignore[arg-type]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_masking_leaves_out_a_whole_sequence_on_either_side() -> None:
    found = importance_weights(TRAINER, ROLLOUT, LAYOUT, level="sequence", mode="mask", cap=1.4)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.0, 1.2, 0.0]))
    found = importance_weights(TRAINER, ROLLOUT, LAYOUT, level="sequence", mode="mask", cap=2, floor=1.3)
    torch.testing.assert_close(found, torch.tensor([1.5, 1.5, 0.0, 0.0]))


def test_importance_weights_are_finite_and_have_no_gradient() -> None:
    trainer = (ROLLOUT + 500).requires_grad_()
    found = importance_weights(trainer, ROLLOUT, LAYOUT, level="sequence", cap=math.inf)
    assert not found.requires_grad
    assert bool(found.isfinite().all())
