"""vLLM 0.27 to 0.31."""

from __future__ import annotations

from posttune_vllm.adapters.base import Adapter


class V027(Adapter):
    """A full reload does not find the weights that adapters wrap (seen in 0.27.1)."""

    reload_beside_lora = False


ADAPTER = V027()
