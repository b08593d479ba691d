"""The conformance kit: subclass the suite of your plugin's kind, name the plugin, run pytest.

from posttune.testing import RewardSuite

class TestMine(RewardSuite):
    name = "mine"

Every suite checks the plugin as it is installed, by the name of its entry point. ``options`` are those
it needs, ``requires`` names the optional promises that hold for it; each suite says which there are.
Importing this module imports neither torch nor pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttune.testing.advantage_suite import AdvantageSuite
    from posttune.testing.converter_suite import DataConverterSuite
    from posttune.testing.exporter_suite import CheckpointExporterSuite
    from posttune.testing.joined import AdvantageEstimatorSuite, PolicyLossSuite
    from posttune.testing.joined_rollout import RolloutBackendSuite
    from posttune.testing.loss_suite import LossSuite
    from posttune.testing.manager_suite import RewardManagerSuite
    from posttune.testing.observer_suite import ObserverSuite
    from posttune.testing.plugin_suite import PluginSuite
    from posttune.testing.reward_suite import RewardSuite

_PLACES = {
    "AdvantageEstimatorSuite": "joined",
    "AdvantageSuite": "advantage_suite",
    "CheckpointExporterSuite": "exporter_suite",
    "DataConverterSuite": "converter_suite",
    "LossSuite": "loss_suite",
    "ObserverSuite": "observer_suite",
    "PluginSuite": "plugin_suite",
    "PolicyLossSuite": "joined",
    "RewardManagerSuite": "manager_suite",
    "RewardSuite": "reward_suite",
    "RolloutBackendSuite": "joined_rollout",
}

SUITES = {
    "rollout_backend": "RolloutBackendSuite",
    "advantage_estimator": "AdvantageEstimatorSuite",
    "policy_loss": "PolicyLossSuite",
    "reward": "RewardSuite",
    "reward_manager": "RewardManagerSuite",
    "data_converter": "DataConverterSuite",
    "checkpoint_exporter": "CheckpointExporterSuite",
    "observer": "ObserverSuite",
}
"""The suite of each kind."""

__all__ = [
    "SUITES",
    "AdvantageEstimatorSuite",
    "AdvantageSuite",
    "CheckpointExporterSuite",
    "DataConverterSuite",
    "LossSuite",
    "ObserverSuite",
    "PluginSuite",
    "PolicyLossSuite",
    "RewardManagerSuite",
    "RewardSuite",
    "RolloutBackendSuite",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
