from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from posttune.data.sampler import PositionSampler


@settings(deadline=None)
@given(
    size=st.integers(1, 40),
    seed=st.integers(0, 2**64 - 1),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    shuffle=st.booleans(),
)
def test_any_cut_of_the_stream_gives_the_same_rows(
    size: int, seed: int, cuts: list[int], shuffle: bool
) -> None:
    sampler = PositionSampler(size, seed, shuffle)
    position, pieces = 0, []
    for count in cuts:
        pieces.extend(sampler.indices(position, count))
        position += count
    assert pieces == sampler.indices(0, position)


@settings(deadline=None)
@given(size=st.integers(1, 40), seed=st.integers(0, 1000), epoch=st.integers(0, 5))
def test_every_epoch_holds_every_row_once(size: int, seed: int, epoch: int) -> None:
    rows = PositionSampler(size, seed).indices(epoch * size, size)
    assert Counter(rows) == Counter(range(size))


def test_epochs_and_seeds_differ() -> None:
    sampler = PositionSampler(100, seed=3)
    assert sampler.indices(0, 100) != sampler.indices(100, 100)
    assert sampler.indices(0, 100) != PositionSampler(100, seed=4).indices(0, 100)
    assert sampler.epoch(99) == 0
    assert sampler.epoch(100) == 1


def test_order_is_frozen() -> None:
    # A run that resumes after an upgrade must see the order that it began with.
    assert PositionSampler(10, seed=7).indices(8, 6) == [9, 0, 3, 9, 1, 6]


def test_more_rows_than_an_epoch() -> None:
    assert PositionSampler(3, shuffle=False).indices(2, 8) == [2, 0, 1, 2, 0, 1, 2, 0]


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        PositionSampler(0)
    with pytest.raises(ValueError, match="negative"):
        PositionSampler(3).indices(-1, 2)
    with pytest.raises(ValueError, match="seed"):
        PositionSampler(3, seed=-1)
