"""The rollout suite on the real engine on a GPU, which it gives back while it sleeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

pytest.importorskip("sglang", reason="needs the engine: make test-gpu on a machine that has it")

from posttune.testing.rollout_suite import RolloutSuite

pytestmark = [pytest.mark.engine, pytest.mark.gpu]


class TestGpu(RolloutSuite):
    backend = "sglang"
    dtype = "bfloat16"
    device = "cuda"
    memory_share = 0.1
    own_process = True
    sleeps = True
    sleep_frees_gb = 4.0
    batch_independent = False  # bfloat16: the shape of a batch rounds, and a kept prefix changes it
    deadline_s = 28.0
    growth_mb = 48.0
    # The tiny model's heads of 32 are not among those that FlashAttention is built for everywhere.
    options: ClassVar[Mapping[str, Any]] = {"attention_backend": "triton", "enforce_eager": True}
