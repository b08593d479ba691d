"""What comes of scoring: of one call, and the limits that all calls of a batch share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from posttune.errors import PosttuneError
from posttune.types import Sample, Score

Unit = Sequence[Sample]
"""The samples of one call: one, or all of a batch where a reward does not judge each by itself."""


@dataclass(frozen=True)
class Checked:
    """The scores of a call, one a sample and in order, after the facade's check."""

    scores: Sequence[Score]
    nan: int = 0  # that became None
    timeouts: int = 0  # samples that the reward scored after a worker of its own ran out of time


@dataclass(frozen=True)
class Outcome:
    """What a call came to: scores, an error, or neither, where time ran out."""

    seconds: float = 0.0
    checked: Checked | None = None
    error: PosttuneError | None = None
    late: bool = False  # the batch's time ran out, not the sample's own


@dataclass(frozen=True)
class Limits:
    """What holds for the calls of one batch."""

    timeout: float | None = None  # seconds a sample
    deadline: float | None = None  # of the batch, on time.monotonic()'s clock
    fail_fast: bool = True  # after an error nothing else is begun

    def of(self, unit: Unit) -> float | None:
        """Seconds for a call."""
        return None if self.timeout is None else self.timeout * len(unit)


Call = Callable[[Unit], Checked]
"""Scores and checks. Raises PosttuneError."""
