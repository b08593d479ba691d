"""posttune-sglang: SGLang as a rollout backend. Importing it imports neither SGLang nor torch."""

from __future__ import annotations

from posttune_sglang.backend import SglangBackend
from posttune_sglang.options import SglangOptions

__all__ = ["SglangBackend", "SglangOptions"]
