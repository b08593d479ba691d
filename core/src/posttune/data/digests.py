"""SHA-256 of the source files, worked out while they are converted where nothing waits for it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from threading import Event

from posttune.data.streams import reading

_PART = 1 << 20


class Digests:
    """Digests of files, in hexadecimal. ``values`` raises `DataError` where a file cannot be read."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._stop = Event()
        self._begun: Future[list[str]] | None = None
        self._values: list[str] | None = None

    def start(self, pool: Executor) -> None:
        """Begin in a thread of ``pool``, unless it is done already."""
        if self._values is None:
            self._begun = pool.submit(self._all)

    def stop(self) -> None:
        """Make what was begun end soon: nobody will ask for it."""
        self._stop.set()

    @property
    def values(self) -> list[str]:
        """One digest a file."""
        if self._values is None:
            self._values = self._all() if self._begun is None else self._begun.result()
        return self._values

    def _all(self) -> list[str]:
        return [self._one(path) for path in self._files]

    def _one(self, path: Path) -> str:
        found = hashlib.sha256()
        with reading(path), path.open("rb", buffering=0) as file:
            while not self._stop.is_set() and (part := file.read(_PART)):
                found.update(part)
        return found.hexdigest()
