"""The weight of the KL term over a run: fixed, or moved towards a target."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping
from typing import Any

from posttune.errors import CheckpointError, UserError

logger = logging.getLogger(__name__)


class KLController:
    """Holds the coefficient, and moves it (Ziegler et al. 2019, arXiv:1909.08593).

    error = clip(kl / target - 1, -0.2, 0.2);  coef <- coef (1 + error n / horizon), where n counts
    the samples behind the measured KL (not steps), and kl is the mean over sequences of the mean
    over their tokens.
    """

    adaptive = False

    def __init__(
        self, coef: float, *, target: float = 0.03, horizon: float = 10_000, samples: int = 1
    ) -> None:
        for name, value in {"target": target, "horizon": horizon, "samples": samples}.items():
            if not value > 0:
                raise UserError(f"the KL controller's {name} must be above 0, not {value}")
        if not 0 <= coef < math.inf:
            raise UserError(f"the KL coefficient must be a number from 0 on, not {coef}")
        self.coef = float(coef)
        self.target = target
        self.horizon = horizon
        self.samples = samples  # of one step: what a call without n stands for

    def update(self, *, kl: float, n: int | None = None, step: int | None = None) -> None:
        """Take a measured KL.

        With ``n``, the samples behind it, this is the trainer's own call after each step: an
        adaptive controller moves, a fixed one stays. Without, it is a call by hand, which moves
        either kind once, as if by one step's samples; ``step`` is logged only. A KL that is not
        finite moves nothing.
        """
        if n is not None and not self.adaptive:
            return
        if n is None and self.adaptive:
            warnings.warn(
                "the trainer moves an adaptive KL coefficient by itself; this call moves it again",
                stacklevel=2,
            )
        if not math.isfinite(kl):
            logger.warning("KL of %s at step %s leaves the coefficient at %g", kl, step, self.coef)
            return
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * (self.samples if n is None else n) / self.horizon
        logger.info("KL coefficient %g after a KL of %g at step %s", self.coef, kl, step)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; plain JSON."""
        return {"adaptive": self.adaptive, "coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved coefficient. Raises CheckpointError for a state of another controller."""
        coef = state.get("coef")
        if state.get("adaptive") is not self.adaptive or not isinstance(coef, float | int):
            raise CheckpointError(
                f"the checkpoint's KL controller ({dict(state)}) is not of this run's kind",
                fix="resume with the kl options that the checkpoint was made with",
            )
        self.coef = float(coef)


class FixedKL(KLController):
    """The trainer never moves the coefficient; a call by hand does."""


class AdaptiveKL(KLController):
    """The trainer moves the coefficient after every step."""

    adaptive = True
