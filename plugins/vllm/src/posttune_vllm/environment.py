"""The environment variables that vLLM reads, for a process of ours or of its own."""

from __future__ import annotations

from posttune.engines.environment import of_child, threads, unless_set


def settings(*, cuda: bool, eager: bool) -> dict[str, str]:
    """What must be set before vLLM is imported; what the user set stays."""
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # standard output is the command's result
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not cuda:
        # An active wait on a busy machine is 20 to 50 times slower; threads are the system's to place.
        wanted |= {"OMP_WAIT_POLICY": "passive", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if eager:
        wanted |= {"TORCH_COMPILE_DISABLE": "1"}  # else the first log-probabilities want a C++ compiler
    # The engine's own process would add a hop to every call, and here there is one already.
    return unless_set(wanted) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def of_engine(device: str, gpus: int, *, eager: bool) -> dict[str, str]:
    """The whole environment of an engine's process, which sees its own GPUs only."""
    return of_child(device, gpus, settings(cuda=device.startswith("cuda"), eager=eager), threads())
