"""New weights on their way to an engine: checked by name and shape, and remembered for the comparison."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from posttune.engines.facts import Facts
from posttune.errors import RunError
from posttune.nearest import nearest

if TYPE_CHECKING:
    import torch

SAME_MODEL = "hand over the weights of the model that the engine was started with, by Hugging Face name"
THREADS = min(16, os.cpu_count() or 1)  # that hash; one does a gigabyte a second
PIECE = 16 << 20  # bytes on their way from a GPU
_COMPUTED = ("inv_freq",)  # buffers that some files hold and every model computes


class Checked:
    """Passes named tensors on. Raises RunError at the first one that does not belong to the model.

    Names and shapes are those of the model's files; where those say nothing the engine decides.
    """

    def __init__(
        self, tensors: Iterable[tuple[str, torch.Tensor]], facts: Facts, needed: set[str], who: str
    ) -> None:
        self._who = who
        self._tensors, self._known, self._needed = tensors, facts.shapes, needed
        self._tied = facts.tied
        self._given: set[str] = set()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors:
            self._check(name, tuple(tensor.shape))
            if not (self._tied and name == "lm_head.weight"):  # the engine ties it itself
                yield name, tensor
        missing = sorted(self._needed - self._given)
        if missing:
            shown = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else "")
            what = f"load_weights: {len(missing)} of {len(self._needed)} tensors are missing ({shown})"
            raise RunError(what, who=self._who, fix="hand over every weight; of a LoRA model the merged ones")

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name in self._given:
            raise RunError(
                f"load_weights: {name!r} was given twice", who=self._who, fix="give each tensor once"
            )
        self._given.add(name)
        if not self._known or (self._tied and name == "lm_head.weight"):
            return
        if name not in self._known:
            near = nearest(name, self._known)
            hint = f" (did you mean {near!r}?)" if near else ""
            raise RunError(
                f"load_weights: the model has no tensor {name!r}{hint}", who=self._who, fix=SAME_MODEL
            )
        if shape != self._known[name]:
            what = (
                f"load_weights: {name!r} has shape {list(shape)}, the model wants {list(self._known[name])}"
            )
            raise RunError(what, who=self._who, fix=SAME_MODEL)


def needed(facts: Facts, live: Any) -> set[str]:
    """Tensors without which a load is incomplete: those of the files that the trainer's module has too."""
    names = {name for name in facts.shapes if not name.endswith(_COMPUTED)}
    if facts.tied:
        names.discard("lm_head.weight")
    if live is not None:
        own = {
            name.removeprefix("base_model.model.").replace(".base_layer.", ".") for name in live.state_dict()
        }
        names &= own
    return names


class Hashes:
    """SHA-256 of tensors by name, in threads. Few wait: each may be a copy that lives for this alone."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._waiting: deque[Future[str]] = deque()
        self._found: dict[str, Future[str]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """The tensor must stay as it is until the results are there."""
        if len(self._waiting) == THREADS:
            self._waiting.popleft().result()
        self._found[name] = self._pool.submit(digest, tensor)
        self._waiting.append(self._found[name])

    def results(self) -> dict[str, str]:
        """Of all that were added."""
        return {name: task.result() for name, task in self._found.items()}


class Remembered:
    """Passes named tensors on, and hashes each as the engine is to hold it."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]], dtype: str, who: str) -> None:
        self._tensors, self._dtype, self._who = tensors, dtype, who
        self._hashes: dict[str, str] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        dtype = getattr(torch, self._dtype)
        with ThreadPoolExecutor(THREADS) as pool:
            hashes = Hashes(pool)
            for name, tensor in self._tensors:
                hashes.add(name, tensor.detach().to(dtype))
                yield name, tensor
            self._hashes = hashes.results()

    def compare(self, found: Mapping[str, str]) -> int:
        """How many tensors could be compared. Raises RunError for those that differ."""
        wanted = self._hashes
        wrong = [name for name in wanted if name in found and found[name] != wanted[name]]
        if wrong:
            shown = ", ".join(wrong[:3]) + (" …" if len(wrong) > 3 else "")
            count = f"{len(wrong)} of {len(wanted)}"
            what = f"{count} tensors are not in the engine as they were handed over ({shown})"
            fix = "report it with the model's architecture; rollout.name hf has the trainer's own weights"
            raise RunError(what, who=self._who, fix=fix)
        return len(wanted.keys() & found.keys())


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes; those on a GPU come in pieces through pinned memory.

    Copied as a whole into memory that is not, they came at 1.4 GB/s.
    """
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # of one element or none
        flat = flat.clone(memory_format=torch.contiguous_format)
    data = flat.view(torch.uint8)
    if not data.is_cuda:
        return hashlib.sha256(data.cpu().numpy().data).hexdigest()
    found, room = hashlib.sha256(), torch.empty(min(PIECE, len(data)), dtype=torch.uint8, pin_memory=True)
    for piece in data.split(PIECE):
        arrived = room[: len(piece)].copy_(piece)
        found.update(arrived.numpy().data)
    return found.hexdigest()
