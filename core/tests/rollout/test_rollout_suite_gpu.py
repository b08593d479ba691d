"""The conformance suite over the `hf` engine on a GPU: with the trainer's module, and with a copy."""

from __future__ import annotations

import pytest
import torch
from posttune.testing.rollout_suite import RolloutSuite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


class TestLiveOnGpu(RolloutSuite):
    backend = "hf"
    device = "cuda"
    dtype = "bfloat16"
    batch_independent = False  # the shape of a batch rounds


class TestCopyOnGpu(TestLiveOnGpu):
    live = False
    dtype = "float32"
