"""Arguments of SGLang's engine: those that core and the options decide, and the free table beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttune.engines.installed import Installed
from posttune.engines.table import check_table, fields_of
from posttune.types import RolloutContext

from posttune_sglang.options import SglangOptions

MEGABYTE = 1 << 20
BESIDE_A_TRAINER, ALONE = 0.45, 0.9
CPU_CACHE_MB, LEAST_CACHE_MB = 2048, 64
CPU_SEQUENCES = 64  # at a time, where nothing is said
SPARE = 16  # SGLang keeps some places of its context back; all of max_length is to be used
LOADER = "posttune_sglang.loader.load"
SAMPLER = "pytorch"  # on a CPU SGLang knows no other; posttune's takes its place (_scheduler)

OWNED = {
    "model_path": "the stage's model",
    "tokenizer_path": "the stage's model",
    "skip_tokenizer_init": "the stage's model",
    "context_length": "the longest prompt and rollout.sampling.max_new_tokens",
    "max_running_requests": "rollout.resources.max_sequences",
    "tp_size": "rollout.resources.tensor_parallel_size",
    "mem_fraction_static": "rollout.resources.memory_share",
    "max_total_tokens": "rollout.options.cache_mb",
    "random_seed": "the run's seed",
    "dtype": "model.dtype, or rollout.options.dtype",
    "device": "training.device",
    "disable_cuda_graph": "rollout.options.enforce_eager",
    "disable_radix_cache": "rollout.options.prefix_caching",
    "attention_backend": "rollout.options.attention_backend",
    "enable_memory_saver": "rollout.options.sleep",
    "custom_weight_loader": "posttune, which hands weights over with it",
    "sampling_backend": "posttune, whose draws belong to a request's seed",
    "preferred_sampling_params": "rollout.sampling",
    "quantization": "nobody yet: new weights could not be handed over faithfully",
    "dp_size": "the trainer, whose every process has an engine of its own",
    "port": "posttune, which finds a free one",
}


def check(options: SglangOptions, engine: Installed) -> None:
    """The free table against the installed ServerArgs, read from its source."""
    check_table(options.engine, names(engine), OWNED, str(engine), "ServerArgs")


def names(engine: Installed) -> set[str]:
    """Fields of ServerArgs: its own, or from 0.5.21 on those of the groups that it is assembled from."""
    folder = engine.folder / "srt"
    own = fields_of(folder / "server_args.py", "ServerArgs")
    return own or set().union(*map(fields_of, sorted((folder / "arg_groups" / "fields").glob("*.py"))))


def engine_arguments(
    options: SglangOptions,
    context: RolloutContext,
    *,
    model: Path,
    tokenizer: Path | None,
    token_bytes: int,
    free_share: float = 1.0,
) -> dict[str, Any]:
    """All arguments but the port. ``token_bytes``: of the key-value cache of one token.

    ``free_share``: the part of the GPU's memory that is free now, of which SGLang's own share is a part.
    """
    cuda = context.device.startswith("cuda")
    eager = options.enforce_eager if options.enforce_eager is not None else not cuda
    found: dict[str, Any] = {
        "model_path": str(model),
        "tokenizer_path": str(tokenizer) if tokenizer else None,
        "skip_tokenizer_init": tokenizer is None,
        "context_length": context.max_length + SPARE,
        "random_seed": context.seed % (1 << 31),
        "dtype": options.dtype or context.dtype,
        "device": "cuda" if cuda else "cpu",
        "disable_cuda_graph": eager,
        "disable_radix_cache": not options.prefix_caching,
        "tp_size": context.resources.tensor_parallel_size,
        "custom_weight_loader": [LOADER],
        "sampling_backend": SAMPLER,
        "log_level": "warning",
        "skip_server_warmup": True,
        "grammar_backend": "none",
        "sleep_on_idle": True,  # else its scheduler keeps a core busy while the trainer works
    }
    if not cuda:
        found |= {"attention_backend": "torch_native", "disable_overlap_schedule": True}
    if options.attention_backend is not None:
        found["attention_backend"] = options.attention_backend
    if sequences := context.resources.max_sequences or (None if cuda else CPU_SEQUENCES):
        found["max_running_requests"] = sequences
    if cuda:
        found["mem_fraction_static"] = min(memory_share(context) / free_share, 0.98)
        found["enable_memory_saver"] = options.sleep
    if options.cache_mb is not None or not cuda:
        size = MEGABYTE * (options.cache_mb or _cpu_cache(context, token_bytes))
        found["max_total_tokens"] = max(size // max(token_bytes, 1), context.max_length + 2 * SPARE)
    return found | options.engine


def memory_share(context: RolloutContext) -> float:
    """Of the GPU's memory, for the engine."""
    return context.resources.memory_share or (ALONE if context.live_model is None else BESIDE_A_TRAINER)


def _cpu_cache(context: RolloutContext, token_bytes: int) -> int:
    """MB for all sequences at full length, within bounds."""
    sequences = context.resources.max_sequences or CPU_SEQUENCES
    needed = sequences * (context.max_length + SPARE) * token_bytes // MEGABYTE
    return min(max(needed + 1, LEAST_CACHE_MB), CPU_CACHE_MB)
