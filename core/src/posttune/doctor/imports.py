"""The process that imports for the doctor: ``python -m posttune.doctor.imports NOTES KIND:NAME ...``.

One line of JSON for each target that was done. Whatever a target does to the process (exit, crash,
hang) is seen from outside as the line that is not there.
"""

from __future__ import annotations

import importlib
import json
import sys

from posttune.doctor.probe import HEAVY


def main(notes: str, targets: list[str]) -> None:
    """Import every target and note what came of it."""
    seen = _heavy()
    for target in targets:
        error = _import(*target.split(":", 1))
        heavy = sorted(_heavy() - seen)
        seen |= set(heavy)
        with open(notes, "a", encoding="utf-8") as file:  # noqa: PTH123
            file.write(json.dumps({"error": error, "heavy": heavy}) + "\n")


def _import(kind: str, name: str) -> str:
    """Empty, or what went wrong."""
    from posttune.errors import PosttuneError
    from posttune.pipeline import load_plugin

    try:
        if kind:
            load_plugin(kind, name)
        else:
            importlib.import_module(name)
    except PosttuneError as error:
        return getattr(error, "what", str(error))
    except BaseException as error:  # noqa: BLE001  (an import may raise anything, and that is the answer)
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


def _heavy() -> set[str]:
    return {name for name in HEAVY if name in sys.modules}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
