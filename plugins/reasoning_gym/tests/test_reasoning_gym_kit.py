"""What holds for every plugin, of the reward `reasoning_gym`."""

from __future__ import annotations

from posttune.testing import PluginSuite


class TestKit(PluginSuite):
    kind = "reward"
    name = "reasoning_gym"
