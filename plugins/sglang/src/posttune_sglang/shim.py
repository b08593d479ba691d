"""Lets SGLang be imported without torchvision, which PyPI has for GPU builds of torch only.

Beside a CPU build of torch that torchvision breaks transformers itself, so a CPU environment has none.
SGLang needs two of its names to define the configuration of one image model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")


def import_sglang() -> None:
    """Import what needs torchvision's names, while they stand in; where it is installed, nothing."""
    if find_spec("torchvision") is not None:
        return
    from transformers.utils.import_utils import is_torchvision_available

    is_torchvision_available()  # remembers for good that there is none
    with _standing_in():
        import sglang.srt.configs.deepseek_ocr  # noqa: F401


@contextmanager
def _standing_in() -> Iterator[None]:
    modules = {name: ModuleType(name) for name in NAMES}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
    transforms, functional = modules["torchvision.transforms"], modules["torchvision.transforms.functional"]
    modes = type("InterpolationMode", (), {"BICUBIC": "bicubic"})
    transforms.__dict__.update(functional=functional, InterpolationMode=modes)
    functional.__dict__.update(InterpolationMode=modes)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in NAMES:
            sys.modules.pop(name, None)
