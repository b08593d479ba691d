"""Conformance of a rollout backend: subclass, name the backend, run with pytest.

class TestMine(RolloutSuite):
    backend = "mine"
    options = {"engine": {"max_model_len": 512}}

Every check runs the real engine through the facade, with a tiny model whose trainer's side is at
hand: what the engine answers is compared with what that model says. One engine serves most checks;
those that need one of their own come last. Attributes switch off what a backend does not claim.
Importing this module imports torch and pytest.
"""

from __future__ import annotations

from posttune.testing._rollout_answers import AnswerChecks
from posttune.testing._rollout_life import LifeChecks
from posttune.testing._rollout_weights import WeightChecks

__all__ = ["RolloutSuite"]


class RolloutSuite(LifeChecks, WeightChecks, AnswerChecks):
    """What every rollout backend must do. A subclass names it and says what it claims beyond."""
