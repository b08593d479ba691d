"""vLLM 0.26, the last on torch 2.11."""

from __future__ import annotations

from typing import Any

from posttune_vllm.adapters.base import Adapter


class V026(Adapter):
    """A full reload does not find the weights that adapters wrap."""

    reload_beside_lora = False

    def reload(self, worker: Any, tensors: Any) -> None:
        # Its second model runner borrows the first one's method, under the engine's configuration.
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(worker.vllm_config):
            worker.model_runner.reload_weights(weights_iterator=tensors, is_checkpoint_format=True)


ADAPTER = V026()
