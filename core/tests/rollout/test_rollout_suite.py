"""The conformance suite over the `hf` engine: with the trainer's module, and with a copy."""

from __future__ import annotations

import pytest
import torch
from posttune.testing.rollout_suite import RolloutSuite

torch.set_num_threads(1)


class TestLive(RolloutSuite):
    backend = "hf"


class TestCopy(RolloutSuite):
    backend = "hf"
    live = False


@pytest.mark.slow
class TestRounded(RolloutSuite):
    backend = "hf"
    live = False
    dtype = "bfloat16"
