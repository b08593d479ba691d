"""The environment variables that vLLM reads, for a process of ours or of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping

# Of the trainer's own process group: an engine that saw them would wait for ranks that are not there.
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR",
          "MASTER_PORT")  # fmt: skip
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


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
    chosen = {name: os.environ.get(name, value) for name, value in wanted.items()}
    # The engine's own process would add a hop to every call, and here there is one already.
    return chosen | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def of_child(device: str, gpus: int, *, eager: bool, threads: int) -> dict[str, str]:
    """The whole environment of an engine's process, which sees its own GPUs only."""
    cuda = device.startswith("cuda")
    found = {name: value for name, value in os.environ.items() if not _of_ranks(name)}
    found |= settings(cuda=cuda, eager=eager)
    found["OMP_NUM_THREADS"] = str(threads)
    if cuda:
        found["CUDA_VISIBLE_DEVICES"] = visible(device, gpus, os.environ)
        for name in _ALLOCATOR:  # sleeping needs an allocator that does not grow its segments
            if "expandable_segments" in found.get(name, ""):
                del found[name]
    return found


def visible(device: str, gpus: int, environment: Mapping[str, str]) -> str:
    """The GPUs of an engine on ``device`` that spans ``gpus`` of them, as CUDA_VISIBLE_DEVICES."""
    first = int(device.partition(":")[2] or 0)
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    names = listed.split(",") if listed else [str(number) for number in range(first + gpus)]
    chosen = names[first : first + gpus] if first + gpus <= len(names) else names[-gpus:]
    return ",".join(chosen)


def _of_ranks(name: str) -> bool:
    return name in _RANKS or name.startswith("TORCHELASTIC_")
