"""An engine without one of its processes ends at once: SGLang's own watch first looks at stacks, for long."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from multiprocessing.connection import wait

STATUS = 4  # of a process whose own process died


class Watch:
    """Over the processes that this one has started with ``multiprocessing``."""

    def __init__(self) -> None:
        self._over = False
        threading.Thread(target=self._run, args=(multiprocessing.active_children(),), daemon=True).start()

    def end(self) -> None:
        """From now on they may end."""
        self._over = True

    def _run(self, processes: list[multiprocessing.Process]) -> None:
        ended = wait([process.sentinel for process in processes]) if processes else []
        if self._over or not ended:
            return
        for process in processes:
            if process.sentinel in ended:
                process.join(1)
                sys.stderr.write(f"process {process.pid} of the engine died: {process.exitcode}\n")
        sys.stderr.flush()
        os._exit(STATUS)
