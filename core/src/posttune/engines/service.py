"""The engine's process: does what the trainer's process asks, one thing at a time.

A plugin's module calls ``main`` with the number of its end of a pair of sockets.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from posttune.engines.answers import Answer, pack_answers, unpack_prompts
from posttune.engines.frames import Channel, Closed

WATCH_S = 1.0


class ServedEngine(Protocol):
    """An engine in the process that it has to itself. Every method raises whatever the engine raises."""

    hello: dict[str, Any]  # what the trainer must know of it

    def generate(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], parameters: dict[str, Any]
    ) -> list[Answer]:
        """``n`` answers to each prompt, in order."""

    def load_buckets(self, buckets: Iterator[dict[str, Any]]) -> None:
        """Take all weights, as descriptions of buckets; each is used before the next is asked for."""

    def load_adapter(self, folder: Path) -> None:
        """Take a PEFT folder as the adapter of further answers."""

    def checksums(self) -> dict[str, str]:
        """SHA-256 by Hugging Face name."""

    def sleep(self) -> None:
        """Free the accelerator."""

    def wake(self, part: str) -> None:
        """Take it again."""

    def stop(self) -> None:
        """The process ends."""


Make = Callable[[dict[str, Any], str], ServedEngine]


class Service:
    """Answers messages until told to stop."""

    def __init__(self, channel: Channel, make: Make) -> None:
        self._channel = channel
        self._make = make
        self._engine: Any = None
        self.scratch: Path | None = None  # the folder that the trainer made for this engine

    def serve(self) -> None:
        """Until "stop", or until the trainer is gone."""
        while True:
            head, block = self._channel.receive()
            if head["op"] == "stop":
                if self._engine is not None:
                    self._engine.stop()
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
                self.scratch = Path(head["scratch"])
                self._engine = self._make(head["arguments"], head["version"])
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
    """The message, and what it came from: engines wrap the interesting one."""
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None and len(parts) < 5:
        parts.append(str(current) if current is error else f"{type(current).__name__}: {current}")
        current = current.__cause__ or current.__context__
    return "\n".join(parts)


def _end_with(parent: int, service: Service) -> None:
    """An engine without a trainer holds memory for nobody; so does its folder, which may lie in memory."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    if service.scratch is not None:
        shutil.rmtree(service.scratch, ignore_errors=True)
    os._exit(3)


def main(descriptor: int, make: Make) -> None:
    """Serve the trainer that started this process, then end it: threads have nothing left to save."""
    service = Service(Channel(socket.socket(fileno=descriptor)), make)
    watch = threading.Thread(target=_end_with, args=(os.getppid(), service), daemon=True)
    watch.start()
    try:
        service.serve()
    except Closed:
        watch.join(2 * WATCH_S)  # a trainer that was killed is seen to be gone a little later
    finally:
        sys.stderr.flush()
    os._exit(0)
