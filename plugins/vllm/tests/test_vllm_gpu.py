"""The rollout suite on a GPU that engine and trainer share: weights by CUDA handle, sleep that frees memory.

Each start takes half a minute: `-k "not Inline"`, or the names of single checks, keep a run short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest

pytest.importorskip("vllm", reason="needs the engine and a GPU: make test-gpu")

import torch
from posttune.errors import RunError, UserError
from posttune.testing._rollout_base import RolloutChecks
from posttune.testing._rollout_bench import Bench, requests
from posttune.testing.rollout_suite import RolloutSuite
from posttune.types import Resources, Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SHARE = 0.12
# The tiny model's heads of 32 are not among those that FlashAttention is built for everywhere.
ENGINE = {"attention_backend": "TRITON_ATTN"}


class TestGpu(RolloutSuite):
    backend = "vllm"
    options: ClassVar[Mapping[str, Any]] = {
        "enforce_eager": True,
        "verify": "always",
        "engine": ENGINE,
    }
    device = "cuda"
    dtype = "bfloat16"
    memory_share = SHARE
    own_process = True
    sleeps = True
    sleep_frees_gb = 8.0 if torch.cuda.is_available() else 0.0
    growth_mb = 64.0  # the GPU's memory is taken in blocks

    def test_weights_cross_without_a_copy(self, bench: Bench) -> None:
        """The engine reads the trainer's own GPU memory: a hand-over allocates next to nothing here."""
        bench.answer(requests()[:1], Sampling(max_new_tokens=2))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        bench.send()
        size = sum(tensor.numel() * tensor.element_size() for tensor in bench.weights().values())
        assert torch.cuda.max_memory_allocated() - before < size / 2


class TestGpuInline(TestGpu):
    batch_independent = False  # bfloat16: the shape of a batch rounds, and here it was seen to
    options: ClassVar[Mapping[str, Any]] = {
        "enforce_eager": True,
        "verify": "always",
        "engine": ENGINE,
        "process": "inline",
        "sleep": False,
    }
    own_process = False
    sleeps = False
    sleep_frees_gb = 0.0


class TestGpuStarts(RolloutChecks):
    """Starts that cannot succeed."""

    backend = "vllm"
    options: ClassVar[Mapping[str, Any]] = {"enforce_eager": True, "engine": ENGINE}
    device = "cuda"
    dtype = "bfloat16"
    memory_share = SHARE

    def test_a_share_that_leaves_nothing_is_refused_before_the_start(self, bench: Bench) -> None:
        """With the ledger of who would hold what."""
        engine = self.make()
        context = replace(bench.context(), resources=Resources(1e-6, 1, 8))
        with pytest.raises(UserError, match=r"(?s)too little for the engine's weights.*the GPU has"):
            engine.start(context)

    def test_memory_that_others_hold_is_told_with_a_ledger(self, bench: Bench) -> None:
        """vLLM's own refusal at its start, with what is on the GPU and what to lower."""
        free, total = torch.cuda.mem_get_info()
        taken = torch.empty(int(free - 0.05 * total), dtype=torch.uint8, device="cuda")
        engine = self.make()
        with pytest.raises(RunError, match=r"(?s)not enough memory.*the trainer's tensors.*next: lower"):
            engine.start(bench.context())
        del taken
        torch.cuda.empty_cache()
