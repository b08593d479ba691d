"""Who holds an accelerator's memory, as text for a message."""

from __future__ import annotations

from collections.abc import Mapping

GIB = 1 << 30


def in_gib(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / GIB:8.2f} GiB"


def ledger(rows: Mapping[str, float]) -> str:
    """One line a holder."""
    width = max((len(name) for name in rows), default=0)
    return "\n".join(f"    {name.ljust(width)} {in_gib(size)}" for name, size in rows.items())


def gpu_rows(device: str, share: float, weights: int) -> dict[str, float]:
    """The GPU as this process sees it. Imports torch, which a trainer has imported."""
    import torch

    if not (device.startswith("cuda") and torch.cuda.is_available()):
        return {}
    free, total = torch.cuda.mem_get_info(device)
    reserved, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    return {
        "the GPU has": total,
        "free": free,
        "the trainer's tensors": used,
        "the trainer's cache beside them": reserved - used,
        "everything else, the engine included": total - free - reserved,
        f"the engine's share ({share:.2f})": share * total,
        "the engine's weights": weights,
    }
