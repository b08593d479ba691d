"""An engine in a process of its own: this one survives its end, and keeps its own chance and threads."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttune.engines.answers import Answer, pack_prompts, unpack_answers
from posttune.engines.buckets import buckets
from posttune.engines.frames import Channel, Closed
from posttune.engines.link import Part, Plan
from posttune.engines.problems import LESS_MEMORY, Told
from posttune.engines.requests import seed_of
from posttune.errors import PosttuneError, RunError
from posttune.types import Request, Sampling

if TYPE_CHECKING:
    import torch

STOP_S = 20.0  # for the engine to end by itself
SHOWN_LINES = 12  # of its log, in the message of its death
READ_LINES = 200  # of its log, for a known reason


class Process:
    """Speaks to ``service.main`` in the plan's module. Its log is a file until it has stopped."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._log = plan.scratch / "engine.log"

    def start(self) -> dict[str, Any]:
        """The process, and the engine in it."""
        plan = self._plan
        ours, theirs = socket.socketpair()
        with self._log.open("wb") as log, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", plan.module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=plan.environment,
                start_new_session=True,  # a Ctrl-C is the trainer's to handle
            )
        self._channel = Channel(ours)
        head, _ = self._ask(
            "start",
            "start",
            arguments=plan.arguments,
            version=plan.version,
            scratch=str(plan.scratch),
            _timeout=plan.start_timeout,
        )
        return dict(head["hello"])

    def generate(self, requests: Sequence[Request], sampling: Sampling, *, logprobs: bool) -> list[Answer]:
        """``n`` answers to each request, in order."""
        head, block = pack_prompts([request.prompt_ids for request in requests])
        head["seeds"] = [seed_of(request) for request in requests]
        head["parameters"] = self._plan.parameters(sampling, logprobs)
        return unpack_answers(*self._ask("generate", "generation", block, **head))

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """In buckets, each free again before the next is made."""
        step = "the hand-over of weights"
        self._tell(step, {"op": "load"})
        try:
            for bucket in buckets(tensors, self._plan.bucket, self._plan.scratch):
                try:
                    self._tell(step, {"op": "bucket", **bucket.describe()})
                    self._hear(step)
                finally:
                    bucket.free()
        except BaseException as error:
            # What was to be sent cannot be had: the engine is told, unless the error is its own.
            if not getattr(error, "from_engine", False):
                with contextlib.suppress(Closed, RunError):
                    self._tell(step, {"op": "abort"})
                    self._listen()
            raise
        self._tell(step, {"op": "end"})
        self._hear(step)

    def load_adapter(self, folder: Path) -> None:
        """From a PEFT folder, which both processes see."""
        self._ask("load_adapter", "the hand-over of an adapter", folder=str(folder))

    def checksums(self) -> dict[str, str]:
        """Read back from the engine."""
        head, _ = self._ask("checksums", "reading its checksums")
        return dict(head["checksums"])

    def sleep(self) -> None:
        """Free the GPU."""
        self._ask("sleep", "going to sleep")

    def wake(self, part: Part) -> None:
        """Take memory again."""
        self._ask("wake", f"waking its {part}", part=part)

    def stop(self) -> None:
        """Ask it to end, then make it."""
        if self._channel is not None and self._process is not None:
            with contextlib.suppress(Closed, subprocess.TimeoutExpired):
                self._channel.send({"op": "stop"})
                self._process.wait(STOP_S)
        self._kill()

    def _kill(self) -> None:
        """The whole session: the engine's own workers too."""
        process, self._process = self._process, None
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _ask(
        self, op: str, step: str, block: bytes = b"", *, _timeout: float | None = None, **fields: Any
    ) -> tuple[dict[str, Any], bytes]:
        self._tell(step, {"op": op, **fields}, block)
        return self._hear(step, _timeout)

    def _tell(self, step: str, message: dict[str, Any], block: bytes = b"") -> None:
        if self._channel is None:
            raise RunError("the engine has stopped", who=self._plan.who, fix="start another")
        try:
            self._channel.send(message, block)
        except Closed as error:
            raise self._death(step) from error
        except BaseException:  # a Ctrl-C: what follows half a message would be read as the rest of it
            self._kill()
            raise

    def _hear(self, step: str, timeout: float | None = None) -> tuple[dict[str, Any], bytes]:
        try:
            head, block = self._listen(timeout)
        except Closed as error:
            raise self._death(step) from error
        except TimeoutError as error:
            self._kill()
            what = f"the engine did not answer within {timeout:.0f} s at {step}\n{self._tail()}"
            fix = "raise rollout.options.start_timeout_s"
            raise RunError(what, who=self._plan.who, fix=fix) from error
        except BaseException:  # a Ctrl-C: the answer that comes would be taken for the next one's
            self._kill()
            raise
        if "error" in head:
            found = self._plan.explainer.explain(Told(**head["error"]), step, self._plan.ledger())
            found.from_engine = True  # type: ignore[attr-defined]
            raise found
        return head, block

    def _listen(self, timeout: float | None = None) -> tuple[dict[str, Any], bytes]:
        if self._channel is None:
            raise Closed("the engine has stopped")
        return self._channel.receive(timeout)

    def _death(self, step: str) -> PosttuneError:
        """The process is gone, or will be: what its log says, else how it ended, and its last words."""
        process, number = self._process, None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                number = process.wait(5)
        self._kill()
        ledger = self._plan.ledger()
        error = self._plan.explainer.read(self._lines()[-READ_LINES:], step, ledger)
        if error is None:
            parts = [f"the engine's process {_end(number)} during {step}", self._tail(), ledger]
            fix = "if the system was out of memory (dmesg says so), give the engine less: " + LESS_MEMORY
            error = RunError("\n".join(part for part in parts if part), who=self._plan.who, fix=fix)
        error.from_engine = True  # type: ignore[attr-defined]
        return error

    def _lines(self) -> list[str]:
        """What the engine wrote, without empty lines."""
        try:
            text = self._log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()]

    def _tail(self) -> str:
        shown = self._lines()[-SHOWN_LINES:]
        return "  its last words:\n" + "\n".join(f"    {line[:300]}" for line in shown) if shown else ""


def _end(number: int | None) -> str:
    if number is None:
        return "closed its connection"
    if number < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-number).name}"
    return f"exited with status {number}"
