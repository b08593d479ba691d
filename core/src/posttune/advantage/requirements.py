"""What an estimator asks of a run, checked before a model loads."""

from __future__ import annotations

from pydantic import BaseModel

from posttune.errors import Problem
from posttune.types import Traits


def unmet(
    traits: Traits, options: BaseModel | None, *, samples_per_prompt: int, critic: bool
) -> list[Problem]:
    """What a run lacks for an estimator with these traits and validated options; empty: nothing.

    A group estimator with one sample per prompt is refused unless its options have a ``singleton``
    of "zero" or "raw". Paths are relative to the RL stage.
    """
    problems = []
    chosen = getattr(options, "singleton", "refuse") in ("zero", "raw")
    if traits.needs_groups and samples_per_prompt < 2 and not chosen:
        message = (
            f"the estimator compares the samples of a prompt, and n is {samples_per_prompt}; "
            "sample at least 2, or set options.singleton of the estimator where it has that option"
        )
        problems.append(Problem("rollout.sampling.n", message))
    if traits.needs_critic and not critic:
        message = "the estimator needs a critic, and the stage has none: add critic: {}"
        problems.append(Problem("advantage.name", message))
    return problems
