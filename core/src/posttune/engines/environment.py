"""The environment variables of an engine's process."""

from __future__ import annotations

import os
from collections.abc import Mapping

# Of the trainer's own process group: an engine that saw them would wait for ranks that are not there.
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR",
          "MASTER_PORT")  # fmt: skip
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def of_child(device: str, gpus: int, settings: Mapping[str, str], threads: int) -> dict[str, str]:
    """The whole environment of an engine's process, which sees its own GPUs only."""
    found = {name: value for name, value in os.environ.items() if not _of_ranks(name)}
    found |= settings
    found["OMP_NUM_THREADS"] = str(threads)
    if device.startswith("cuda"):
        found["CUDA_VISIBLE_DEVICES"] = visible(device, gpus, os.environ)
        for name in _ALLOCATOR:  # sleeping needs an allocator that does not grow its segments
            if "expandable_segments" in found.get(name, ""):
                del found[name]
    return found


def unless_set(wanted: Mapping[str, str]) -> dict[str, str]:
    """What the user set stays."""
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def visible(device: str, gpus: int, environment: Mapping[str, str]) -> str:
    """The GPUs of an engine on ``device`` that spans ``gpus`` of them, as CUDA_VISIBLE_DEVICES."""
    first = int(device.partition(":")[2] or 0)
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    names = listed.split(",") if listed else [str(number) for number in range(first + gpus)]
    chosen = names[first : first + gpus] if first + gpus <= len(names) else names[-gpus:]
    return ",".join(chosen)


def threads() -> int:
    """As many as the trainer uses: the two take turns."""
    import torch

    return torch.get_num_threads()


def _of_ranks(name: str) -> bool:
    return name in _RANKS or name.startswith("TORCHELASTIC_")
