"""The engine's process: does what the trainer's process asks, one thing at a time.

Started as ``python -m posttune_vllm._child FD`` with one end of a pair of sockets.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttune_vllm.answers import pack_answers, unpack_prompts
from posttune_vllm.frames import Channel, Closed

WATCH_S = 1.0


class Service:
    """Answers messages until told to stop."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._engine: Any = None

    def serve(self) -> None:
        """Until "stop", or until the trainer is gone."""
        while True:
            head, block = self._channel.receive()
            if head["op"] == "stop":
                return
            try:
                reply, answer = self._do(head.pop("op"), head, block)
            except Closed:
                raise
            except BaseException as error:  # noqa: BLE001 - whatever it is, the trainer is told, and decides
                place = "".join(traceback.format_exception(error)[-4:])
                told = {"kind": type(error).__name__, "text": _chain(error), "place": place}
                reply, answer = {"error": told}, b""
            self._channel.send(reply, answer)

    def _do(self, op: str, head: dict[str, Any], block: bytes) -> tuple[dict[str, Any], bytes]:
        engine = self._engine
        match op:
            case "start":
                from posttune_vllm._engine import Engine

                self._engine = Engine(head["arguments"], head["version"])
                return {"hello": self._engine.hello}, b""
            case "generate":
                prompts = unpack_prompts(head, block)
                return pack_answers(engine.generate(prompts, head["seeds"], head["parameters"]))
            case "load":
                engine.load_buckets(self._buckets())
            case "load_adapter":
                engine.load_adapter(Path(head["folder"]))
            case "checksums":
                return {"checksums": engine.checksums()}, b""
            case "sleep":
                engine.sleep()
            case "wake":
                engine.wake(head["part"])
            case _:
                raise RuntimeError(f"the engine's process knows no {op!r}")
        return {}, b""

    def _buckets(self) -> Iterator[dict[str, Any]]:
        while True:
            head, _ = self._channel.receive()
            if head["op"] == "end":
                return
            if head["op"] == "abort":
                raise RuntimeError("the trainer could not go on: the weights are incomplete")
            yield head
            if head["handles"]:
                import torch

                torch.cuda.synchronize()  # the lent memory has been read
            self._channel.send({})


def _chain(error: BaseException) -> str:
    """The message, and what it came from: vLLM wraps the interesting one."""
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None and len(parts) < 5:
        parts.append(str(current) if current is error else f"{type(current).__name__}: {current}")
        current = current.__cause__ or current.__context__
    return "\n".join(parts)


def _end_with(parent: int) -> None:
    """An engine without a trainer holds memory for nobody."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(3)


def main(descriptor: int) -> None:
    """Serve the trainer that started this process."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    service = Service(Channel(socket.socket(fileno=descriptor)))
    try:
        service.serve()
    except Closed:
        return
    finally:
        sys.stderr.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)  # vLLM's threads and destructors have nothing left to save
