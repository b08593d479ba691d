"""The conformance kit on the reward `sympy_math`."""

from __future__ import annotations

import pytest
from posttune.testing import RewardSuite


@pytest.mark.slow
class TestKit(RewardSuite):
    name = "sympy_math"
    requires = RewardSuite.requires | {"unscorable"}
