"""What holds for every plugin, as far as it holds without the engine.

Without its engine a plugin is listed and documented, and refused where it is named in a run. So what composes
it is left to the rollout suite, which runs where the engine is.
"""

from __future__ import annotations

from posttune.testing import PluginSuite


class TestWithoutEngine(PluginSuite):
    kind = "rollout_backend"
    name = "vllm"
    test_composes_in_a_fresh_process = None
    test_composes_twice = None
    test_options_survive_json = None
    test_wrong_options_are_refused_by_name = None
