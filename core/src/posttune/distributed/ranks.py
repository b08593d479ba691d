"""The processes of a run: their number, their device, and the few exchanges between them.

One process needs no process group and pays nothing. Several are started by a launcher that sets
``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` (torchrun does). Tensors of the model travel over NCCL on
GPUs and over gloo on CPUs; objects and barriers always over gloo.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from posttune.errors import RunError, UserError

T = TypeVar("T")

BUCKET_ELEMENTS = 1 << 23
DEADLINE_S = 1800.0


@dataclass(frozen=True)
class Ranks:
    """This process among the ``world`` processes of the run."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    deadline_s: float = DEADLINE_S
    control: Any = None  # the gloo group of objects and barriers

    @classmethod
    def current(cls, device: str = "auto", *, deadline_s: float = DEADLINE_S) -> Ranks:
        """Read the launcher's variables and join the process group where there is more than one process.

        ``device``: auto, cpu, cuda or cuda:N; auto and cuda take the GPU of ``LOCAL_RANK``.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        chosen = _device(device, int(os.environ.get("LOCAL_RANK", "0")))
        if world == 1:
            return cls(device=chosen, deadline_s=deadline_s)
        if not dist.is_initialized():
            _join(chosen, deadline_s)
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
        return cls(dist.get_rank(), dist.get_world_size(), chosen, deadline_s, control)

    @property
    def main(self) -> bool:
        """Whether this process writes files and speaks to the user."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """This rank's contiguous part; the parts of all ranks in order are ``items``."""
        size = len(items)
        return list(items[size * self.rank // self.world : size * (self.rank + 1) // self.world])

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, on every rank; ``tensor`` itself stays as it is."""
        if self.world == 1:
            return tensor
        total = tensor.detach().to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(tensor.device)

    def sum_grads(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Replace each gradient by its sum over ranks. Every rank must hold the same gradients."""
        if self.world == 1:
            return
        for bucket in _buckets(param.grad for param in params if param.grad is not None):
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            dist.all_reduce(flat)
            pieces = torch.split(flat, [grad.numel() for grad in bucket])
            for grad, piece in zip(bucket, pieces, strict=True):
                grad.copy_(piece.view_as(grad))

    def gather_objects(self, items: Sequence[T]) -> list[T]:
        """All ranks' items in rank order, on rank 0; an empty list elsewhere."""
        if self.world == 1:
            return list(items)
        parts: list[list[T] | None] | None = [None] * self.world if self.main else None
        dist.gather_object(list(items), parts, dst=0, group=self.control)
        return list(chain.from_iterable(part or [] for part in parts or []))

    def all_objects(self, item: T) -> list[T]:
        """One item of every rank, in rank order, on every rank."""
        if self.world == 1:
            return [item]
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, item, group=self.control)
        return parts

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return any(self.all_objects(flag))

    def broadcast_object(self, item: T) -> T:
        """Rank 0's item, on every rank."""
        if self.world == 1:
            return item
        box: list[T] = [item]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def barrier(self, stage: str) -> None:
        """Wait for the others. A rank that misses the deadline ends the run by name."""
        if self.world == 1:
            return
        try:
            dist.monitored_barrier(self.control, timedelta(seconds=self.deadline_s), wait_all_ranks=True)
        except RuntimeError as error:
            raise RunError(
                f"not every rank reached {stage!r} within {self.deadline_s:g} s: {error}",
                who=f"rank {self.rank}",
                fix="look at the output of the ranks that are named; the first error there is the cause",
            ) from error

    @contextmanager
    def main_first(self, stage: str) -> Iterator[None]:
        """Rank 0 runs the block before the others do, so that they find the files that it wrote."""
        if not self.main:
            self.barrier(stage)
        yield
        if self.main:
            self.barrier(stage)

    def close(self) -> None:
        """Leave the process group. Harmless where there is none."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _device(name: str, local_rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(
            f"device {name!r} is not one that torch knows", fix="use auto, cpu or cuda"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name!r}: torch finds no GPU", fix="use device: auto, or cpu")
    return torch.device("cuda", local_rank) if name == "cuda" else device


def _join(device: torch.device, deadline_s: float) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=deadline_s))


def _buckets(grads: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one dtype, at most ``BUCKET_ELEMENTS`` together unless a single one is larger."""
    bucket: list[torch.Tensor] = []
    size = 0
    for grad in grads:
        full = size + grad.numel() > BUCKET_ELEMENTS
        if bucket and (full or bucket[0].dtype != grad.dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += grad.numel()
    if bucket:
        yield bucket
