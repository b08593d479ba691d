"""vLLM 0.32 and 0.33."""

from __future__ import annotations

from posttune_vllm.adapters.base import Adapter

ADAPTER = Adapter()
