"""The hooks of a backend whose engine holds weights of its own, and the state that they share."""

from __future__ import annotations

import logging
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from posttune.engines.answers import completions
from posttune.engines.ends import settled
from posttune.engines.facts import Facts
from posttune.engines.folder import write_adapter
from posttune.engines.link import Link
from posttune.engines.requests import check
from posttune.errors import RunError, UserError
from posttune.hookspecs import hookimpl
from posttune.types import BackendInfo, Completion, Request, RolloutContext, Sampling

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
SHARED_MEMORY = Path("/dev/shm")
Logprobs = Literal["auto", "always", "never"]
Verify = Literal["first", "always", "never"]


class EngineOptions(Protocol):
    """Options that every such backend has."""

    @property
    def logprobs(self) -> Logprobs:
        """When log-probabilities of the sampled tokens are asked for."""

    @property
    def verify(self) -> Verify:
        """After which loads every tensor is read back and compared."""


@dataclass(frozen=True)
class Prepared:
    """An engine that is checked and not yet started."""

    name: str  # of the backend; the engine's hello has its version under it
    link: Link
    facts: Facts
    needed: set[str]  # tensors without which a load is incomplete
    max_length: int
    has_tokenizer: bool  # whoever looks for stop strings
    tokenizer: Any  # the run's own, where there is one
    dtype: str
    scratch: Path
    lora: bool
    sleeps: bool
    logprobs: Literal["none", "raw", "processed"]
    server: bool
    details: dict[str, str]

    def started(self, hello: dict[str, Any]) -> BackendInfo:
        """What core is told."""
        details = {**self.details, "version": str(hello[self.name]), "dtype": str(hello["dtype"])}
        return BackendInfo(
            name=self.name,
            sleep=self.sleeps,
            lora=self.lora,
            logprobs=self.logprobs,
            server=self.server,
            details=details,
        )


def scratch_root(folder: str | None = None) -> Path | None:
    """Where weights and logs lie on their way: memory where there is such a folder."""
    if folder is not None:
        return Path(folder)
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else None


class EngineBackend(ABC):
    """Starts, asks and stops a ``Link``; a subclass prepares it.

    A load that breaks off leaves a mixture of weights, and nothing is generated until a whole one came.
    Greedy answers of one request are the same: one is drawn for all.
    """

    who: ClassVar[str] = ""

    def __init__(self, config: Any) -> None:
        self.config = config
        self._link: Link | None = None
        self._ready: Prepared | None = None
        self._scratch: Path | None = None
        self._version = 0
        self._loads = 0
        self._whole = True  # no load was broken off

    def scratch(self) -> Path | None:
        """Under which folder this engine's own is made; None: the system's for temporary files."""
        return scratch_root()

    @abstractmethod
    def prepare(self, context: RolloutContext, scratch: Path) -> Prepared:
        """Check what can be known. Raises UserError for what would fail."""

    @hookimpl
    def rollout_backend_start(self, context: RolloutContext) -> BackendInfo:
        """Check what can be known, then start the engine with the weights of ``context.model_path``."""
        name = f"posttune-{type(self).__name__.lower()}-"
        self._scratch = Path(tempfile.mkdtemp(prefix=name, dir=self.scratch()))
        try:
            self._ready = self.prepare(context, self._scratch)
            self._link = self._ready.link
            return self._ready.started(self._link.start())
        except BaseException:
            self.rollout_backend_stop()
            raise

    @hookimpl
    def rollout_backend_generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Answer every request ``sampling.n`` times, request-major."""
        ready, link = self._started()
        check(requests, sampling, ready.max_length, tokenizer=ready.has_tokenizer, who=self.who)
        if not self._whole:
            what = "a hand-over of weights was broken off: the engine holds a mixture"
            raise RunError(what, who=self.who, fix="load all weights again")
        wanted: Logprobs = self.config.logprobs
        logprobs = wanted == "always" or (wanted == "auto" and sampling.logprobs)
        copies = sampling.n if sampling.temperature == 0 else 1
        asked = replace(sampling, n=sampling.n // copies)
        found = link.generate(requests, asked, logprobs=logprobs)
        ended = [settled(answer, sampling, ready.tokenizer) for answer in found]
        answers = [answer for answer in ended for _ in range(copies)]
        return completions(requests, sampling.n, answers, self._version)

    @hookimpl
    def rollout_backend_load_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, adapter: str | None
    ) -> bool:
        """Take weights in place and drop every cache.

        With ``adapter``, the PEFT folder whose configuration they follow, they are an adapter's alone.
        """
        ready, link = self._started()
        if adapter is not None:
            folder = write_adapter(tensors, Path(adapter), ready.scratch, self.who)
            link.load_adapter(folder)
            shutil.rmtree(folder)
            self._version = version
            return True
        from posttune.engines.weights import Checked, Remembered

        self._whole = False
        checked = Checked(tensors, ready.facts, ready.needed, self.who)
        verify: Verify = self.config.verify
        if verify == "always" or (verify == "first" and not self._loads):
            remembered = Remembered(checked, ready.dtype, self.who)
            link.load(remembered)
            self._compared(remembered.compare(link.checksums()))
        else:
            link.load(checked)
        self._whole, self._version = True, version
        self._loads += 1
        return True

    @hookimpl
    def rollout_backend_checksums(self) -> dict[str, str]:
        """SHA-256 of each tensor by Hugging Face name, read back from the engine."""
        ready, link = self._started()
        found = link.checksums()
        return {name: found[name] for name in found if not ready.facts.shapes or name in ready.facts.shapes}

    @hookimpl
    def rollout_backend_sleep(self) -> bool:
        """Free the weights and the cache; the weights must be loaded again."""
        _, link = self._started()
        link.sleep()
        self._whole = False
        return True

    @hookimpl
    def rollout_backend_wake(self, part: Literal["weights", "cache"]) -> bool:
        """Take memory for the weights, and after they were loaded for the cache."""
        _, link = self._started()
        link.wake(part)
        return True

    @hookimpl
    def rollout_backend_stop(self) -> bool:
        """End the engine and remove what was written for it."""
        link, self._link = self._link, None
        scratch, self._scratch = self._scratch, None
        try:
            if link is not None:
                link.stop()
        finally:
            if scratch is not None:
                shutil.rmtree(scratch, ignore_errors=True)
        return True

    def _started(self) -> tuple[Prepared, Link]:
        if self._link is None or self._ready is None:
            raise UserError("the engine is not running", who=self.who, fix="start it first")
        return self._ready, self._link

    def _compared(self, count: int) -> None:
        if self._loads:
            return
        if count == 0:
            log.warning("%s: no tensor could be read back from the engine to be compared", self.who)
        else:
            log.info("%s: %d tensors read back from the engine equal those handed over", self.who, count)
