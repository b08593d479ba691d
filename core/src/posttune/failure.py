"""How an error of one of several processes gets to the one place that speaks of it.

A launcher names a file for each process (torch's own convention). What is written there says where the
error was and whether it is but the echo of another process's end.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttune.errors import (
    CheckpointError,
    DataError,
    ExportError,
    ModelError,
    PosttuneError,
    RunError,
    UserError,
)
from posttune.files import atomic_write_text

FILE = "TORCHELASTIC_ERROR_FILE"
STATUS = "POSTTUNE_STATUS"
"""Names the folder in which posttune's own launcher reads what each process does, and its error."""

LAUNCHED = "POSTTUNE_LAUNCHED"
"""Set where the launcher is posttune's own, which prints the errors of its processes."""

ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection was likely closed",
    "Socket Timeout",
    "Broken pipe",
    "NCCL error",
)
LATE = ("Timed out waiting", "Timeout waiting", "timed out", "failed to pass monitoredBarrier")
_SIMPLE = (UserError, DataError, ModelError, RunError, CheckpointError, ExportError)


def describe(error: BaseException, where: str) -> dict[str, Any]:
    """The error as data. ``where``: stage and part of the step."""
    ours = isinstance(error, PosttuneError)
    return {
        "kind": type(error).__name__,
        "what": error.what if isinstance(error, PosttuneError) else f"{type(error).__name__}: {error}",
        "who": error.who if isinstance(error, PosttuneError) else "",
        "fix": error.fix if isinstance(error, PosttuneError) else "",
        "code": error.exit_code if isinstance(error, PosttuneError) else 1,
        "where": where,
        "traceback": "" if ours else "".join(traceback.format_exception(error)),
        "time": time.time(),
        "echo": any(sign in str(error) for sign in ECHOES),
        "late": is_late(error),
    }


def is_late(error: BaseException) -> bool:
    """Whether a wait for the others went on past the deadline."""
    return isinstance(error, RuntimeError | RunError) and any(sign in str(error) for sign in LATE)


def late(why: str, where: str) -> dict[str, Any]:
    """The record of a process that ends itself because it waited too long."""
    fix = (
        "see the stacks: the process that waits for nobody holds the others up; or raise parallel.deadline_s"
    )
    made = describe(RunError(why, fix=fix), where)
    return made | {"late": True}


def record(found: Mapping[str, Any]) -> None:
    """Write it where the launcher looks: for torch's in its form, for posttune's own as it is."""
    folder, path = os.environ.get(STATUS), os.environ.get(FILE)
    if folder is not None:
        atomic_write_text(Path(folder) / f"{os.environ.get('RANK', '0')}.json", json.dumps(found))
    if path is None:
        return
    text = f"{found['who']}: {found['what']}" if found["who"] else str(found["what"])
    about = {"py_callstack": found["traceback"], "timestamp": str(int(time.time()))}
    document = {"message": {"message": text, "extraInfo": about}}
    atomic_write_text(Path(path), json.dumps(document))


def read_records(folder: Path) -> dict[int, dict[str, Any]]:
    """What the processes of posttune's own launcher left of their errors, by rank."""
    return {int(path.stem): json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))}


def rebuilt(found: Mapping[str, Any], rank: int) -> PosttuneError:
    """The error again, with the rank and the place in front. A mistake of the user's stays as it is."""
    kinds = {kind.__name__: kind for kind in _SIMPLE}
    kind = kinds.get(str(found["kind"]), UserError if found["code"] == 2 else RunError)
    place = f"rank {rank}" + (f", {found['where']}" if found["where"] else "")
    who = str(found["who"]).removeprefix(f"rank {rank}")
    if not (rank == 0 and found["code"] == 2):
        who = f"{place}: {who}" if who else place
    return kind(str(found["what"]), who=who, fix=str(found["fix"]))
