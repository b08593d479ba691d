"""What differs between versions of vLLM, one module each, chosen by the installed version."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from packaging.version import Version

if TYPE_CHECKING:
    from posttune_vllm.adapters.base import Adapter

# The oldest version that each module serves; it serves all up to the next one's.
MODULES = {Version("0.26"): "v0_26", Version("0.27"): "v0_27", Version("0.32"): "v0_32"}


def name_for(version: Version) -> str:
    """The module for a version that is in range."""
    return MODULES[max(first for first in MODULES if first.release <= version.release[:2])]


def adapter(name: str) -> Adapter:
    """The adapter of a module. Its methods import vLLM."""
    found: Adapter = import_module(f"posttune_vllm.adapters.{name}").ADAPTER
    return found
