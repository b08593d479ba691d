"""A worker that scores: it composes its reward anew from name and options, and answers call after call.

Requests are pickles of samples, read from the pool's own socket; answers are JSON.
"""

from __future__ import annotations

import json
import pickle
import resource
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttune.errors import PosttuneError
from posttune.execution import frames
from posttune.execution.frames import tell
from posttune.execution.remote_errors import pack_error

if TYPE_CHECKING:
    from posttune.execution.outcome import Call

ENTRY = f"{__name__}:serve"
PRELOAD = ("posttune.facade", "posttune.reward.function", "posttune.execution.listing")


def serve(channel: socket.socket) -> None:
    """Answer until the other side is gone."""
    setup = frames.receive(channel)
    if setup is None:
        return
    try:
        call = _composed(json.loads(setup))
    except PosttuneError as error:
        tell(channel, {"failed": pack_error(error)})
        return
    tell(channel, {"ready": True})
    while (request := frames.receive(channel)) is not None:
        began = time.monotonic()
        answer = _answer(call, request)
        tell(channel, answer | {"seconds": time.monotonic() - began})


def _composed(setup: dict[str, Any]) -> Call:
    """The reward, made from its configuration as any other process makes it."""
    from posttune.config.base import PluginRef
    from posttune.facade.rewards import RewardCall
    from posttune.pipeline import compose
    from posttune.reward.loading import also_look_in, refuse_file

    for folder in setup["folders"]:
        also_look_in(Path(folder))
    if setup["main"]:
        refuse_file(Path(setup["main"]))
    if setup["memory_mb"] is not None:
        limit = setup["memory_mb"] * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    (member,) = compose("reward", [PluginRef(**setup["ref"])])
    call = RewardCall(member)
    call.needs()  # loads a function given by path
    return call


def _answer(call: Call, request: bytes) -> dict[str, Any]:
    try:
        checked = call(pickle.loads(request))  # noqa: S301  (the pool wrote it)
    except PosttuneError as error:
        return {"error": pack_error(error)}
    return {"scores": list(checked.scores), "nan": checked.nan, "timeouts": checked.timeouts}
