"""Takes the place of SGLang's compiled kernels on a CPU, where PyPI has none.

SGLang imports names from ``sgl_kernel`` and calls them only on the paths that need a kernel. Those paths
say so here. With ``attention_backend: torch_native`` and unquantised weights none is taken. Only an
engine's process that found no ``sgl_kernel`` sees this module.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*arguments: Any, **named: Any) -> Any:
        # No stub: this stands where a compiled kernel would, and what cannot be computed says so.
        raise NotImplementedError(f"sgl_kernel.{name}: this SGLang has no kernels for a CPU")

    kernel.__name__ = name
    return kernel
