"""Write the snapshot of all hook signatures: ``python core/tests/plugins/write_hook_signatures.py``.

Do so only together with a new ``posttune.API`` (core's major.minor), or for an addition that
plugins of today survive: an optional hook, or one more argument.
"""

from __future__ import annotations

import json
from pathlib import Path

from posttune.hooks import signatures

SNAPSHOT = Path(__file__).with_name("hook_signatures.json")


def text() -> str:
    """The snapshot as it should stand in the file."""
    return json.dumps(signatures(), indent=2) + "\n"


if __name__ == "__main__":
    SNAPSHOT.write_text(text(), encoding="utf-8")
