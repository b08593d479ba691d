"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from posttune.config.models import OptimizerConfig


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Learning rate of ``step`` (from 0) of ``total_steps``.

    Warm-up reaches the peak at its last step, ``(step + 1) / warmup_steps``; then the schedule falls
    from 1 at the end of the warm-up to ``min_lr_ratio`` at ``total_steps``, and stays there.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    after = step - config.warmup_steps
    progress = min(1.0, after / max(1, total_steps - config.warmup_steps))
    floor = config.min_lr_ratio
    return config.lr * (floor + (1.0 - floor) * _shape(config.schedule, progress))


def _shape(schedule: str, progress: float) -> float:
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0
