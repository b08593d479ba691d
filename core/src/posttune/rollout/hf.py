"""The built-in engine: transformers, in the trainer's process, on a CPU or a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from posttune.config.models import Positive, Strict
from posttune.hookspecs import hookimpl
from posttune.types import BackendInfo, Completion, Request, RolloutContext, Sampling

if TYPE_CHECKING:
    import torch

    from posttune.rollout._engine import Engine

log = logging.getLogger(__name__)


class HFConfig(Strict):
    """Options of the `hf` engine."""

    cache_mb: Positive | None = Field(
        None,
        description="Memory of a batch's key-value cache and logits, MB. Defaults to resources.memory_share "
        "of the accelerator, else to half of what it has free; 2048 on a CPU.",
    )


class HFBackend:
    """Generates with transformers: from the trainer's own module where there is one, else from a copy.

    Log-probabilities are of the distribution that was sampled from, after temperature, top-k and
    top-p; of greedy answers, at temperature 1. With LoRA the adapters are applied, not merged, so
    they equal the trainer's to rounding. ``resources.tensor_parallel_size`` is not used.
    """

    Config = HFConfig

    def __init__(self, config: HFConfig) -> None:
        self.config = config
        self._engine: Engine | None = None

    @hookimpl
    def rollout_backend_start(self, context: RolloutContext) -> BackendInfo:
        """Take the live module, or load a copy from ``context.model_path``."""
        from posttune.rollout._engine import Engine

        if context.resources.tensor_parallel_size > 1:
            log.warning("rollout 'hf' runs on one device: tensor_parallel_size is not used")
        if context.resources.memory_share is not None and not context.device.startswith("cuda"):
            log.warning("rollout 'hf' runs on no GPU: memory_share is not used; see options.cache_mb")
        self._engine = Engine(context, self.config.cache_mb)
        return self._engine.info

    @hookimpl
    def rollout_backend_generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Answer every request ``sampling.n`` times, request-major."""
        return self._started().generate(requests, sampling)

    @hookimpl
    def rollout_backend_load_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, adapter: str | None
    ) -> bool:
        """Copy the weights in place; of a live module, check the names and note the version."""
        self._started().load_weights(tensors, version, adapter)
        return True

    @hookimpl
    def rollout_backend_checksums(self) -> dict[str, str]:
        """SHA-256 of each tensor's bytes by Hugging Face name."""
        return self._started().checksums()

    @hookimpl
    def rollout_backend_stop(self) -> bool:
        """Let go of the model."""
        self._engine = None
        return True

    def _started(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the engine was not started")
        return self._engine
