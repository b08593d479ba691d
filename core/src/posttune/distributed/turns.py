"""What the first process does alone while the others wait, however long it takes.

It shows that it lives; where that stops for a deadline, the others end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch.distributed import distributed_c10d

from posttune.errors import RunError

BEAT_S = 2.0
_POLL_S = 0.05
_turns = count()  # every process takes as many turns, so that all count alike


def next_turn() -> str:
    """The name of this turn, the same on every process."""
    return f"posttune/turn/{next(_turns)}"


@contextmanager
def beating(turn: str) -> Iterator[None]:
    """The first process's part: a sign of life until the block has ended well, then the sign that it has."""
    store = distributed_c10d._get_default_store()
    stop = threading.Event()
    thread = threading.Thread(target=_beat, args=(store, turn, stop), name="posttune-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    store.set(turn, "done")


def _beat(store: Any, turn: str, stop: threading.Event) -> None:
    number = 0
    while not stop.wait(BEAT_S):
        number += 1
        store.set(f"{turn}/beat", str(number))


def await_main(turn: str, what: str, deadline_s: float) -> None:
    """The others' part. Raises RunError where the first process gives no sign of life for a deadline."""
    store = distributed_c10d._get_default_store()
    seen, since = b"", time.monotonic()
    while not store.check([turn]):
        beat = store.get(f"{turn}/beat") if store.check([f"{turn}/beat"]) else b""
        if beat != seen:
            seen, since = beat, time.monotonic()
        if time.monotonic() - since > max(deadline_s, 3 * BEAT_S):
            raise RunError(
                f"rank 0 gave no sign of life for {deadline_s:g} s while it did {what!r}",
                who="another process",
                fix="look at the output of rank 0; the first error there is the cause",
            )
        time.sleep(_POLL_S)
