"""The rollout suite on the real engine: in a process of its own, in this one, in bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

pytest.importorskip("vllm", reason="needs the engine: make test-engines")

from posttune.testing.rollout_suite import RolloutSuite

pytestmark = pytest.mark.engine


class TestChild(RolloutSuite):
    backend = "vllm"
    own_process = True


class TestInline(RolloutSuite):
    backend = "vllm"
    options: ClassVar[Mapping[str, Any]] = {"process": "inline"}


class TestBfloat16(RolloutSuite):
    backend = "vllm"
    dtype = "bfloat16"
    own_process = True
