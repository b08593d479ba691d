"""SGLang's scheduler process with posttune's sampler in it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.sampler import register_sampler_backend
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from posttune_sglang._sampler import SeededSampler
from posttune_sglang.arguments import SAMPLER


def run(*arguments: Any, **named: Any) -> Any:
    """In place of SGLang's own function for that process (``Engine.run_scheduler_process_func``)."""
    register()
    _pass_seeds()
    return run_scheduler_process(*arguments, **named)


def register() -> None:
    """Put the sampler in the place of SGLang's own in PyTorch."""
    register_sampler_backend(SAMPLER, SeededSampler)


def _pass_seeds() -> None:
    """A batch carries its requests' seeds; SGLang itself fills them in in its deterministic mode only."""
    plain = SamplingBatchInfo.from_schedule_batch.__func__

    def seeded(cls: type[SamplingBatchInfo], batch: Any, vocab_size: int) -> SamplingBatchInfo:
        info: SamplingBatchInfo = plain(cls, batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.device, non_blocking=True)
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(seeded)
