"""Metrics add up whatever the split."""

from __future__ import annotations

import pytest
import torch
from posttune.distributed.ranks import Ranks
from posttune.trainer.metrics import Meter, combine, note_memory, reset_peak_memory


def test_means_are_weighted_by_their_counts() -> None:
    meter = Meter()
    meter.mean("loss", 6.0, 3)
    meter.mean("loss", torch.tensor(4.0), torch.tensor(1))
    assert meter.reduce(Ranks()) == {"loss": 2.5}


def test_a_mean_of_nothing_is_absent() -> None:
    meter = Meter()
    meter.mean("kl", 0.0, 0)
    meter.spread("reward", [])
    assert meter.reduce(Ranks()) == {}


def test_spread_is_the_population_deviation() -> None:
    meter = Meter()
    meter.spread("reward", [1.0, 0.0])
    meter.spread("reward", [1.0, 0.0])
    assert meter.reduce(Ranks()) == {"reward/mean": 0.5, "reward/std": 0.5}


def test_equal_values_have_no_deviation() -> None:
    meter = Meter()
    meter.spread("reward", [0.1] * 7)
    assert meter.reduce(Ranks())["reward/std"] == pytest.approx(0.0, abs=1e-8)


def test_ranks_with_other_names_and_counts_give_the_whole() -> None:
    values = [0.3, 1.5, -2.0, 4.0, 0.25]
    whole = Meter()
    parts = [Meter(), Meter()]
    for index, value in enumerate(values):
        for meter in (whole, parts[index % 2]):
            meter.mean("loss", value)
            meter.spread("reward", [value])
            meter.sum("tokens", 2)
            meter.peak("gap", value)
    parts[1].mean("only/here", 5.0)
    found = combine([part.local() for part in parts])
    assert found.pop("only/here") == 5.0
    assert found == pytest.approx(whole.reduce(Ranks()), abs=1e-12)


def test_times_add_up_and_no_tensor_keeps_a_graph() -> None:
    meter = Meter()
    for _ in range(2):
        with meter.timed("reward"):
            pass
    weight = torch.ones((), requires_grad=True)
    meter.mean("loss", weight * 2)
    assert not any(getattr(total, "requires_grad", False) for total, _ in meter._means["loss"])
    assert 0 <= meter.reduce(Ranks())["time/reward_s"] < 1


def test_memory_is_noted_by_phase() -> None:
    meter = Meter()
    reset_peak_memory(torch.device("cpu"))
    with meter.timed("step"), meter.timed("update"):
        pass
    note_memory(meter)
    found = meter.reduce(Ranks())
    assert 10 < found["memory/update/rss_mb"] <= found["memory/peak_mb"] + 1 < 1e6
    assert "memory/step/rss_mb" not in found
