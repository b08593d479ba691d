"""Seconds by sample, told by rewards that judge one sample at a time within one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_seconds: ContextVar[dict[str, float] | None] = ContextVar("seconds by sample id", default=None)

_timeouts: ContextVar[list[None] | None] = ContextVar("samples that ran out of time", default=None)
_sample: ContextVar[list[bool]] = ContextVar("whether the present sample ran out of time", default=[])  # noqa: B039


@contextmanager
def seconds_by_sample() -> Iterator[dict[str, float]]:
    """Collect the seconds that each sample takes, by its id, from rewards that judge one at a time."""
    collected: dict[str, float] = {}
    token = _seconds.set(collected)
    try:
        yield collected
    finally:
        _seconds.reset(token)


@contextmanager
def timeouts() -> Iterator[list[None]]:
    """Collect what runs out of time in a ``posttune.workers.Pool`` meanwhile: one entry a sample."""
    collected: list[None] = []
    token = _timeouts.set(collected)
    try:
        yield collected
    finally:
        _timeouts.reset(token)


def note_timeout() -> None:
    """Tell that the present sample ran out of time, where someone collects it."""
    collected, sample = _timeouts.get(), _sample.get()
    if collected is not None and not (sample and sample[0]):
        collected.append(None)
        if sample:
            sample[0] = True


@contextmanager
def one_sample() -> Iterator[None]:
    """All time-outs meanwhile are of one sample."""
    token = _sample.set([False])
    try:
        yield
    finally:
        _sample.reset(token)


def note(sample_id: str, seconds: float) -> None:
    """Tell what a sample took, where someone collects it."""
    collected = _seconds.get()
    if collected is not None:
        collected[sample_id] = seconds
