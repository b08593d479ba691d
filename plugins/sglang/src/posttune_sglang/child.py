"""The engine's own process: ``python -m posttune_sglang.child FD``. Those that it starts read this too."""

from __future__ import annotations

import sys
from typing import Any

from posttune_sglang.shim import import_sglang


def make(arguments: dict[str, Any], version: str) -> Any:
    """SGLang, imported once it is asked for: the trainer is told of an import that fails."""
    import_sglang()
    from posttune_sglang._engine import Engine

    return Engine(arguments, version)


if __name__ == "__main__":
    from posttune.engines.service import main

    main(int(sys.argv[1]), make)
elif __name__ == "__mp_main__":
    import_sglang()
