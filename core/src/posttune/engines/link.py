"""What a backend asks of an engine, wherever it runs; and the plan of one that is to be started."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from posttune.engines.answers import Answer
from posttune.engines.ledger import gpu_rows, ledger
from posttune.engines.problems import Explainer
from posttune.types import Request, Sampling

if TYPE_CHECKING:
    import torch

Part = Literal["weights", "cache"]


@dataclass(frozen=True)
class Plan:
    """An engine that is to be started."""

    explainer: Explainer
    arguments: dict[str, Any]
    version: str  # the adapter's module
    device: str
    bucket: int  # bytes
    scratch: Path
    start_timeout: float
    parameters: Callable[[Sampling, bool], dict[str, Any]]  # of the engine; the bool: with log-probabilities
    module: str = ""  # run by python -m with the number of a socket, where the engine has its own process
    environment: Mapping[str, str] | None = None  # of that process
    share: float = 0.0  # of the GPU
    weights: int = 0  # bytes, for the ledger

    @property
    def who(self) -> str:
        """The engine, in messages."""
        return self.explainer.who

    @property
    def cuda(self) -> bool:
        """Whether it is on a GPU."""
        return self.device.startswith("cuda")

    def ledger(self) -> str:
        """Who holds the GPU's memory; empty on a CPU."""
        rows = gpu_rows(self.device, self.share, self.weights)
        return ledger(rows) if rows else ""


class Link(Protocol):
    """An engine in this process, in a child of it, or behind a server."""

    def start(self) -> dict[str, Any]:
        """Start it; what its worker says of itself."""

    def generate(self, requests: Sequence[Request], sampling: Sampling, *, logprobs: bool) -> list[Answer]:
        """``n`` answers to each request, in order."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take all weights and drop the caches."""

    def load_adapter(self, folder: Path) -> None:
        """Take a PEFT folder as the adapter of further answers."""

    def checksums(self) -> dict[str, str]:
        """SHA-256 by Hugging Face name, as far as the engine can tell."""

    def sleep(self) -> None:
        """Free the accelerator."""

    def wake(self, part: Part) -> None:
        """Take it again."""

    def stop(self) -> None:
        """End it; twice is fine."""
