"""Seconds by sample, told by rewards that judge one sample at a time within one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_seconds: ContextVar[dict[str, float] | None] = ContextVar("seconds by sample id", default=None)


@contextmanager
def seconds_by_sample() -> Iterator[dict[str, float]]:
    """Collect the seconds that each sample takes, by its id, from rewards that judge one at a time."""
    collected: dict[str, float] = {}
    token = _seconds.set(collected)
    try:
        yield collected
    finally:
        _seconds.reset(token)


def note(sample_id: str, seconds: float) -> None:
    """Tell what a sample took, where someone collects it."""
    collected = _seconds.get()
    if collected is not None:
        collected[sample_id] = seconds
