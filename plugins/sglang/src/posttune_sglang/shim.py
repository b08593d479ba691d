"""Lets SGLang be imported beside the transformers and the torch that a trainer has.

- PyPI has torchvision for GPU builds of torch only; beside a CPU build it breaks transformers itself, so a
  CPU environment has none. SGLang needs a few of its names to define configurations of image models.
- SGLang registers model types that newer versions of transformers have by themselves, and stops at that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

NAMES = ("torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.functional")


def import_sglang() -> None:
    """Import what of SGLang would fail by itself; the rest of it imports as it is afterwards."""
    from transformers.utils.import_utils import is_torchvision_available

    is_torchvision_available()  # where there is none, that is remembered for good
    with _registering_again(), nullcontext() if find_spec("torchvision") else _standing_in():
        import sglang.srt.configs  # noqa: F401


@contextmanager
def _registering_again() -> Iterator[None]:
    """A model type that transformers knows already may be registered: SGLang's own counts here."""
    import transformers

    auto: Any = transformers.AutoConfig
    plain = auto.register

    def again(model_type: str, config: Any, **_: Any) -> None:
        plain(model_type, config, exist_ok=True)

    auto.register = staticmethod(again)
    try:
        yield
    finally:
        auto.register = staticmethod(plain)


@contextmanager
def _standing_in() -> Iterator[None]:
    """Names of torchvision, for as long as SGLang's modules take them."""
    modules = {name: ModuleType(name) for name in NAMES}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
    transforms, functional = modules["torchvision.transforms"], modules["torchvision.transforms.functional"]
    modes = type("InterpolationMode", (), {"BICUBIC": "bicubic"})
    transforms.__dict__.update(functional=functional, InterpolationMode=modes)
    functional.__dict__.update(InterpolationMode=modes)
    modules["torchvision.io"].__dict__.update(decode_jpeg=None)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in NAMES:
            sys.modules.pop(name, None)
