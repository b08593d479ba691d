"""What holds for every plugin, without the encoder."""

from __future__ import annotations

from typing import ClassVar

from posttune.testing import PluginSuite


class TestKit(PluginSuite):
    kind = "reward"
    name = "bertscore"
    options: ClassVar = {"model": "nowhere"}
