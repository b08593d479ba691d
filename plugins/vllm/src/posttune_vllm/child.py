"""The engine's own process: ``python -m posttune_vllm.child FD``."""

from __future__ import annotations

import sys
from typing import Any

from posttune.engines.service import main


def make(arguments: dict[str, Any], version: str) -> Any:
    """vLLM, imported once it is asked for: the trainer is told of an import that fails."""
    from posttune_vllm._engine import Engine

    return Engine(arguments, version)


if __name__ == "__main__":
    main(int(sys.argv[1]), make)
