"""The environment variables that SGLang reads, for a process of its own."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from posttune.engines.environment import of_child, threads, unless_set

CPU_MODULES = Path(__file__).parent / "cpu"


def of_engine(device: str, gpus: int, scratch: Path) -> dict[str, str]:
    """The whole environment of an engine's process. Its temporary files lie in ``scratch`` and go with it."""
    cuda = device.startswith("cuda")
    wanted = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Its own limit is for users who mistype; here the model's positions are checked before.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if not cuda:
        # An active wait on a busy machine is 20 to 50 times slower.
        wanted |= {"OMP_WAIT_POLICY": "passive", "SGLANG_USE_CPU_ENGINE": "1", "TORCH_COMPILE_DISABLE": "1"}
    found = of_child(device, gpus, unless_set(wanted) | {"TMPDIR": str(scratch)}, threads())
    if not cuda and find_spec("sgl_kernel") is None:
        path = [str(CPU_MODULES), *filter(None, [os.environ.get("PYTHONPATH")])]
        found["PYTHONPATH"] = os.pathsep.join(path)
    return found
