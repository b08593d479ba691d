"""What the backend asks of an engine, wherever it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from posttune.types import Request, Sampling

from posttune_vllm.answers import Answer

if TYPE_CHECKING:
    import torch

Part = Literal["weights", "cache"]


@dataclass(frozen=True)
class Plan:
    """An engine that is to be started."""

    arguments: dict[str, Any]
    version: str  # the adapter's module
    device: str
    bucket: int  # bytes
    scratch: Path
    start_timeout: float
    share: float = 0.0  # of the GPU
    weights: int = 0  # bytes, for the ledger

    @property
    def cuda(self) -> bool:
        """Whether it is on a GPU."""
        return self.device.startswith("cuda")

    @property
    def eager(self) -> bool:
        """Whether nothing is compiled."""
        return bool(self.arguments["enforce_eager"])

    @property
    def gpus(self) -> int:
        """That one engine spans."""
        return int(self.arguments["tensor_parallel_size"])


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
