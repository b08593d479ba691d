"""The name that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, names: Iterable[str]) -> str:
    """The one of ``names`` that is most like ``name``; empty where none is like it."""
    by_folded = {_fold(candidate): candidate for candidate in names}
    found = get_close_matches(_fold(name), by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else ""


def _fold(name: str) -> str:
    return name.lower().replace("-", "_")
