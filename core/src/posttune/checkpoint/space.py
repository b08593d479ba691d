"""Room on a disk."""

from __future__ import annotations

import shutil
from pathlib import Path


def free_bytes(path: Path) -> int:
    """What the disk has left where ``path`` is, or will be."""
    absolute = path.absolute()
    existing = next(place for place in (absolute, *absolute.parents) if place.exists())
    return shutil.disk_usage(existing).free


def shortage(path: Path, needed: int) -> str:
    """Why ``needed`` bytes do not fit at ``path``; empty where they do."""
    free = free_bytes(path)
    return "" if needed <= free else f"{needed:,} bytes are needed, and the disk has {free:,} left"
