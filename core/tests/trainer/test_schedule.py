"""The learning rate is a pure function of the step."""

from __future__ import annotations

import pytest
from posttune.config.models import OptimizerConfig
from posttune.trainer.schedule import learning_rate


def rates(total: int, **options: object) -> list[float]:
    config = OptimizerConfig.model_validate({"lr": 1.0, **options})
    return [learning_rate(step, total, config) for step in range(total + 1)]


def test_constant_with_warmup_reaches_the_peak_at_the_last_warmup_step() -> None:
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]


def test_linear_falls_to_the_floor() -> None:
    assert rates(4, schedule="linear", min_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_is_half_way_in_the_middle_and_at_the_floor_in_the_end() -> None:
    found = rates(10, schedule="cosine", min_lr_ratio=0.1)
    assert found[0] == 1.0
    assert found[5] == pytest.approx(0.55)
    assert found[10] == pytest.approx(0.1)
    assert found == sorted(found, reverse=True)


def test_after_the_warmup_the_schedule_begins_at_its_top() -> None:
    found = rates(12, warmup_steps=2, schedule="cosine")
    assert found[1] == 1.0
    assert found[2] == 1.0


def test_beyond_the_end_the_floor_stays() -> None:
    config = OptimizerConfig(lr=1.0, schedule="linear", min_lr_ratio=0.5)
    assert learning_rate(99, 10, config) == 0.5


def test_warmup_longer_than_the_stage_only_rises() -> None:
    assert rates(3, warmup_steps=10, schedule="cosine") == pytest.approx([0.1, 0.2, 0.3, 0.4])
