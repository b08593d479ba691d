"""What differs between versions of SGLang, chosen by the installed one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from packaging.version import Version

# The oldest version that each name stands for; it stands for all up to the next one's.
FIRST = {Version("0.5.17"): "v0_5_17", Version("0.5.21"): "v0_5_21"}
SESSIONS = {"v0_5_21"}  # take weights between a begin and an end only


def name_for(version: Version) -> str:
    """The name for a version that is in range."""
    return FIRST[max(first for first in FIRST if first.release <= version.release)]


@contextmanager
def updating(engine: Any, name: str) -> Iterator[None]:
    """Around everything that SGLang's loader is asked for, by an engine of version ``name``."""
    if name not in SESSIONS:
        yield
        return
    accepted(engine.begin_weight_update())
    try:
        yield
    finally:
        accepted(engine.end_weight_update())


def accepted(answer: Any) -> None:
    """SGLang answers (False, message) where others raise."""
    success, message = answer[0], answer[1]
    if not success:
        raise RuntimeError(f"SGLang refused: {message}")
