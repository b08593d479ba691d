"""What the engine asks of a version, with the answers that hold for most of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


class Adapter:
    """One version of vLLM."""

    reload_beside_lora = True  # whether full weights can be loaded while adapters are enabled

    def model_of(self, worker: Any) -> nn.Module:
        """The module that a worker runs."""
        model: nn.Module = worker.model_runner.get_model()
        return model

    def reload(self, worker: Any, tensors: Any) -> None:
        """Load a whole checkpoint into weights that were repacked after the first load."""
        worker.reload_weights(weights_iterator=tensors, is_checkpoint_format=True)

    def mend(self, worker: Any) -> None:
        """After a reload that was broken off: every layer can be loaded again, whatever it holds now."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with set_current_vllm_config(worker.vllm_config):
            finalize_layerwise_reload(self.model_of(worker), worker.vllm_config.model_config)

    def refresh_tied_head(self, model: nn.Module) -> None:
        """On a CPU the head keeps a packed copy of a tied embedding, which a reload leaves stale."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in model.modules():
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    def sleep(self, llm: Any) -> None:
        """Free weights and cache. Level 2: no copy in the host's memory, which costs a second a GiB."""
        llm.sleep(level=2)

    def wake(self, llm: Any, part: str) -> None:
        """Take memory for "weights" or "cache"."""
        llm.wake_up(tags=["weights" if part == "weights" else "kv_cache"])

    def server_arguments(self) -> str:
        """What a server of this version is launched with, beside the model."""
        return (
            "--logprobs-mode processed_logprobs --worker-extension-cls posttune_vllm.worker.WorkerExtension"
        )
