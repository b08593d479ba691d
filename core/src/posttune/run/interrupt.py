"""Ctrl-C and SIGTERM as a wish: the step in progress ends, a checkpoint is written, the run stops."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class InterruptFlag:
    """Set by the first Ctrl-C or SIGTERM; a second one raises KeyboardInterrupt at once.

    Trainers ask between steps. Under a launcher a repeated SIGTERM is the launcher's own and is
    only noted, since it is sent to every rank as soon as one of them has ended.
    """

    def __init__(self) -> None:
        self._set = False

    def __bool__(self) -> bool:
        return self._set

    def is_set(self) -> bool:
        """Whether the user asked to stop."""
        return self._set

    def set(self) -> None:
        """Ask the run to stop after the step in progress."""
        self._set = True

    @contextmanager
    def installed(self) -> Iterator[InterruptFlag]:
        """Handle the two signals inside the block. Outside the main thread Python allows none."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._set:
            if number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ:
                return
            raise KeyboardInterrupt
        self._set = True
        if os.environ.get("RANK", "0") == "0":
            message = "posttune: stopping after this step; press Ctrl-C again to stop at once\n"
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, message.encode())
