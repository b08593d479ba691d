"""Arguments of vLLM's engine: those that core and the options decide, and the free table beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttune.engines.installed import Installed
from posttune.engines.table import check_table, fields_of
from posttune.types import RolloutContext

from posttune_vllm.options import MEGABYTE, VllmOptions

EXTENSION = "posttune_vllm.worker.WorkerExtension"
BESIDE_A_TRAINER, ALONE = 0.45, 0.9
CPU_CACHE_MB, LEAST_CACHE_MB = 2048, 64
CPU_SEQUENCES = 64  # at a time, where nothing is said

OWNED = {
    "model": "the stage's model",
    "tokenizer": "the stage's model",
    "skip_tokenizer_init": "the stage's model",
    "max_model_len": "the longest prompt and rollout.sampling.max_new_tokens",
    "max_num_seqs": "rollout.resources.max_sequences",
    "tensor_parallel_size": "rollout.resources.tensor_parallel_size",
    "gpu_memory_utilization": "rollout.resources.memory_share, or rollout.options.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.options.cache_mb",
    "seed": "the run's seed",
    "dtype": "model.dtype, or rollout.options.dtype",
    "enforce_eager": "rollout.options.enforce_eager",
    "enable_prefix_caching": "rollout.options.prefix_caching",
    "enable_sleep_mode": "rollout.options.sleep",
    "enable_lora": "rollout.options.lora_rank",
    "max_lora_rank": "rollout.options.lora_rank",
    "logprobs_mode": "posttune, whose log-probabilities are of the distribution that is sampled from",
    "generation_config": "rollout.sampling",
    "override_generation_config": "rollout.sampling",
    "worker_extension_cls": "posttune, which hands weights over with it",
    "quantization": "nobody yet: new weights could not be handed over faithfully",
    "data_parallel_size": "the trainer, whose every process has an engine of its own",
}


def check(options: VllmOptions, engine: Installed) -> None:
    """The free table against the installed EngineArgs, read from its source."""
    known = fields_of(engine.folder / "engine" / "arg_utils.py", "EngineArgs")
    check_table(options.engine, known, OWNED, str(engine), "EngineArgs")


def engine_arguments(
    options: VllmOptions,
    context: RolloutContext,
    *,
    model: Path,
    tokenizer: Path | None,
    token_bytes: int,
) -> dict[str, Any]:
    """All arguments. ``token_bytes``: of the key-value cache of one token."""
    cuda = context.device.startswith("cuda")
    eager = options.enforce_eager if options.enforce_eager is not None else not cuda
    found: dict[str, Any] = {
        "model": str(model),
        "tokenizer": str(tokenizer) if tokenizer else None,
        "skip_tokenizer_init": tokenizer is None,
        "max_model_len": context.max_length,
        "seed": context.seed % (1 << 31),
        "dtype": options.dtype or context.dtype,
        "enforce_eager": eager,
        "enable_prefix_caching": options.prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": EXTENSION,
        "tensor_parallel_size": context.resources.tensor_parallel_size,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if sequences := context.resources.max_sequences or (None if cuda else CPU_SEQUENCES):
        found["max_num_seqs"] = sequences
    if cuda:
        found["gpu_memory_utilization"] = memory_share(options, context)
        found["enable_sleep_mode"] = options.sleep
    if options.cache_mb is not None or not cuda:
        found["kv_cache_memory_bytes"] = MEGABYTE * (options.cache_mb or _cpu_cache(context, token_bytes))
    if options.lora_rank:
        found |= {"enable_lora": True, "max_lora_rank": options.lora_rank}
    return found | options.engine


def memory_share(options: VllmOptions, context: RolloutContext) -> float:
    """Of the GPU's memory, for the engine."""
    asked = options.gpu_memory_utilization or context.resources.memory_share
    return asked or (ALONE if context.live_model is None else BESIDE_A_TRAINER)


def _cpu_cache(context: RolloutContext, token_bytes: int) -> int:
    """MB for all sequences at full length, a block more each, within bounds."""
    sequences = context.resources.max_sequences or CPU_SEQUENCES
    needed = sequences * (context.max_length + 128) * token_bytes // MEGABYTE
    return min(max(needed + 1, LEAST_CACHE_MB), CPU_CACHE_MB)
