"""What is written to standard output, by Python or below it."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Output:
    """What was written; filled in once the block ends."""

    text: str = ""


@contextlib.contextmanager
def stdout_of() -> Iterator[Output]:
    """Catch what the block writes to standard output, child processes and C code included."""
    found = Output()
    python = io.StringIO()
    saved = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            with contextlib.redirect_stdout(python):
                yield found
        finally:
            os.dup2(saved, 1)
            os.close(saved)
            file.seek(0)
            found.text = python.getvalue() + file.read().decode("utf-8", "replace")
