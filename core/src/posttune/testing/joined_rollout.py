"""The suite of rollout backends: what holds for every plugin, and what `RolloutSuite` checks.

class TestMine(RolloutBackendSuite):
    name = "mine"

Importing this module imports torch and pytest.
"""

from __future__ import annotations

from typing import Any, ClassVar

from posttune.testing.plugin_suite import PluginSuite
from posttune.testing.rollout_suite import RolloutSuite


class RolloutBackendSuite(PluginSuite, RolloutSuite):
    """What every rollout backend must do. See `RolloutSuite` for what a subclass may declare."""

    kind: ClassVar[str] = "rollout_backend"

    def make(self) -> Any:
        """The engine, composed and not started."""
        return RolloutSuite.make(self)

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if cls.name:
            cls.backend = cls.name
