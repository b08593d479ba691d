"""Watches the processes of a launcher: which of them was gone first, and that the rest follow soon."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import psutil

POLL_S = 0.05


@dataclass
class Keeper:
    """``first``: the rank of the process that ended first; None while all run."""

    processes: int
    patience_s: float  # between the end of the first and that of the others
    first: int | None = None
    _known: dict[int, psutil.Process] = field(default_factory=dict)  # by rank
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the children of this process while the block runs."""
        thread = threading.Thread(target=self._watch, name="posttune-keeper", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _watch(self) -> None:
        since = 0.0
        while not self._stop.wait(POLL_S):
            self._find()
            gone = [rank for rank, process in self._known.items() if _ended(process)]
            if gone and self.first is None:
                self.first, since = gone[0], time.monotonic()
            if gone and time.monotonic() - since > self.patience_s:
                self._kill()

    def _find(self) -> None:
        if len(self._known) == self.processes:
            return
        for child in psutil.Process().children():
            with suppress(psutil.Error, KeyError, ValueError):
                self._known.setdefault(int(child.environ()["RANK"]), child)

    def _kill(self) -> None:
        for process in self._known.values():
            with suppress(psutil.Error):
                process.kill()


def _ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True
