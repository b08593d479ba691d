"""What holds for every plugin, without the engine."""

from __future__ import annotations

from posttune.testing import PluginSuite


class TestKit(PluginSuite):
    kind = "rollout_backend"
    name = "sglang"
