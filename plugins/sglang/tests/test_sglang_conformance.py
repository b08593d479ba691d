"""The rollout suite on the real engine, in float32 and in bfloat16."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang", reason="needs the engine: make test-engines")

from posttune.testing.rollout_suite import RolloutSuite

pytestmark = pytest.mark.engine


class TestFloat32(RolloutSuite):
    backend = "sglang"
    own_process = True
    deadline_s = 28.0  # SGLang looks after its processes every few seconds
    growth_mb = 24.0  # three processes


class TestBfloat16(TestFloat32):
    dtype = "bfloat16"
    batch_independent = False  # a kept prefix changes the shape of what is computed
