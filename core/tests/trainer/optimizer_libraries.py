"""Libraries of optimisers, kept beside the environment: see requirements-optimizers.txt."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "optimizers"
LIBRARY = {"torchao": "torchao", "bnb": "bitsandbytes"}


def need(name: str) -> None:
    """Make the library of an optimiser, or of the start of its name, importable; skip where there is none."""
    library = LIBRARY.get(name.partition("_")[0])
    if library is None:
        return
    if importlib.util.find_spec(library) is None and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    pytest.importorskip(library)
