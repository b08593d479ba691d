"""posttune-vllm: vLLM as a rollout backend. Importing it imports neither vLLM nor torch."""

from __future__ import annotations

from posttune_vllm.backend import VllmBackend
from posttune_vllm.options import VllmOptions

__all__ = ["VllmBackend", "VllmOptions"]
