"""The processes of a run: their number, their device, and the few exchanges between them.

One process needs no process group and pays nothing. Several are started by a launcher that sets
``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` (torchrun does). Tensors of the model travel over NCCL on
GPUs and over gloo on CPUs; objects and barriers always over gloo.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from posttune.config.parallel import Layout, ParallelConfig
from posttune.distributed import turns, watch
from posttune.errors import RunError, UserError

T = TypeVar("T")

BUCKET_ELEMENTS = 1 << 23
NCCL_LATER_S = 60.0
DEADLINE_S = 1800.0
at_close: list[Callable[[], None]] = []
"""Called before the process group is left, by what keeps groups of its own."""


@dataclass(frozen=True)
class Ranks:
    """This process among the ``world`` processes of the run.

    Rank r holds slice ``r % tensor`` of every matrix, and works on the rows of share ``r // tensor``.
    Processes of one share do the same work; the others' rows are summed and gathered over shares.
    """

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    deadline_s: float = DEADLINE_S
    control: Any = None  # the gloo group of objects and barriers
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data_group: Any = None  # of tensors, over the shares; None: all processes
    data_control: Any = None  # of objects, over the shares; None: `control`
    peers: Any = None  # gloo, the processes of this share; None where there is but one

    @classmethod
    def current(
        cls, device: str = "auto", *, parallel: ParallelConfig | None = None, deadline_s: float | None = None
    ) -> Ranks:
        """Read the launcher's variables and join the process group where there is more than one process.

        ``device``: auto, cpu, cuda or cuda:N; auto and cuda take the GPU of ``LOCAL_RANK``.
        Raises UserError where ``parallel`` does not fit the number of processes.
        """
        parallel = parallel or ParallelConfig()
        deadline_s = deadline_s or parallel.deadline_s
        world = int(os.environ.get("WORLD_SIZE", "1"))
        chosen = _device(device, int(os.environ.get("LOCAL_RANK", "0")))
        layout = parallel.layout(world)
        if world == 1:
            return cls(device=chosen, deadline_s=deadline_s, parallel=parallel)
        if not dist.is_initialized():
            _join(chosen, deadline_s)
        rank = dist.get_rank()
        control = _gloo(list(range(world)), deadline_s)
        groups = _groups(rank, layout, deadline_s) if layout.tensor > 1 else {}
        ranks = cls(rank, world, chosen, deadline_s, control, parallel, **groups)
        watch.start(ranks.all_objects_of_world(watch.here()), rank, deadline_s)
        return ranks

    @property
    def main(self) -> bool:
        """Whether this process writes files and speaks to the user."""
        return self.rank == 0

    @property
    def layout(self) -> Layout:
        """Copies, shards and slices."""
        return self.parallel.layout(self.world)

    @property
    def data_rank(self) -> int:
        """Which share of the rows is this process's."""
        return self.rank // self.parallel.tensor

    @property
    def data_world(self) -> int:
        """Shares of the rows."""
        return self.world // self.parallel.tensor

    def share(self, items: Sequence[T]) -> list[T]:
        """This process's contiguous part; the parts of all shares in order are ``items``."""
        size, part, parts = len(items), self.data_rank, self.data_world
        return list(items[size * part // parts : size * (part + 1) // parts])

    def longest_share(self, size: int) -> int:
        """Items in the largest part of ``size`` of them: for what all processes do equally often."""
        return -(-size // self.data_world)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over shares, on every process; ``tensor`` itself stays as it is."""
        if self.data_world == 1:
            return tensor
        total = tensor.detach().to(self.device, copy=True)
        with watch.waiting("a sum over processes"):
            dist.all_reduce(total, group=self.data_group)
        return total.to(tensor.device)

    def sum_grads(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Replace each gradient by its sum over shares. Every process must hold the same gradients."""
        if self.data_world == 1:
            return
        with watch.waiting("the sum of gradients"):
            for bucket in _buckets(param.grad for param in params if param.grad is not None):
                flat = torch.cat([grad.reshape(-1) for grad in bucket])
                dist.all_reduce(flat, group=self.data_group)
                pieces = torch.split(flat, [grad.numel() for grad in bucket])
                for grad, piece in zip(bucket, pieces, strict=True):
                    grad.copy_(piece.view_as(grad))

    def gather_objects(self, items: Sequence[T]) -> list[T]:
        """All shares' items in their order, on rank 0; an empty list elsewhere."""
        if self.data_world == 1:
            return list(items) if self.main else []
        group = self.data_control or self.control
        first = self.rank % self.parallel.tensor
        parts: list[list[T] | None] | None = [None] * self.data_world if self.rank == first else None
        with watch.waiting("the gathering of samples"):
            dist.gather_object(list(items), parts, dst=first, group=group)
        return list(chain.from_iterable(part or [] for part in parts or [])) if self.main else []

    def all_objects(self, item: T) -> list[T]:
        """One item of every share, in their order, on every process."""
        return self._all(item, self.data_world, self.data_control or self.control)

    def all_objects_of_world(self, item: T) -> list[T]:
        """One item of every process, in rank order, on every process."""
        return self._all(item, self.world, self.control)

    def _all(self, item: T, size: int, group: Any) -> list[T]:
        if size == 1:
            return [item]
        parts: list[Any] = [None] * size
        with watch.waiting("an exchange between processes"):
            dist.all_gather_object(parts, item, group=group)
        return parts

    def exchanged(self, items: Sequence[T]) -> list[T]:
        """Item i goes to share i; what all shares have for this one, in their order. Its own stays."""
        if self.data_world == 1:
            return list(items)
        found: list[T] = []
        for share in range(self.data_world):
            mine = share == self.data_rank
            going = [None if place == share else item for place, item in enumerate(items)] if mine else None
            source, box = share * self.parallel.tensor + self.rank % self.parallel.tensor, [None]
            with watch.waiting("an exchange between processes"):
                dist.scatter_object_list(box, going, src=source, group=self.data_control or self.control)
            found.append(items[share] if mine else cast(T, box[0]))
        return found

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any process."""
        return any(self.all_objects_of_world(flag))

    def broadcast_object(self, item: T) -> T:
        """Rank 0's item, on every process."""
        if self.world == 1:
            return item
        return self._first(item, 0, self.control)

    def agreed(self, item: T) -> T:
        """The item of the first process of this share, on all of them.

        For what is not bound to come out alike twice, as an engine's samples or a judge's scores: the
        processes of a share must see the same.
        """
        return (
            item
            if self.peers is None
            else self._first(item, self.rank - self.rank % self.parallel.tensor, self.peers)
        )

    def _first(self, item: T, source: int, group: Any) -> T:
        box: list[T] = [item]
        with watch.waiting(f"rank {source}"):
            dist.broadcast_object_list(box, src=source, group=group)
        return box[0]

    def barrier(self, stage: str) -> None:
        """Wait for the others. A process that misses the deadline ends the run by name."""
        if self.world == 1:
            return
        try:
            with watch.waiting(stage):
                dist.monitored_barrier(self.control, timedelta(seconds=self.deadline_s), wait_all_ranks=True)
        except RunError as error:
            raise RunError(
                f"not every rank reached {stage!r} within {self.deadline_s:g} s: {error.__cause__}",
                who=f"rank {self.rank}",
                fix="look at the output of the ranks that are named; the first error there is the cause",
            ) from error

    @contextmanager
    def main_first(self, stage: str) -> Iterator[None]:
        """Rank 0 runs the block before the others do, so that they find the files that it wrote."""
        if not self.main:
            self._await_main(stage)
            yield
            return
        with self.alone(stage):
            yield

    @contextmanager
    def alone(self, stage: str) -> Iterator[None]:
        """The block has work for rank 0 alone, of any length; the others wait at its end."""
        if self.world == 1:
            yield
        elif self.main:
            with turns.beating(turns.next_turn()):
                yield
            self.barrier(stage)  # it may leave, and the store with it, when all have seen that it is done
        else:
            yield
            self._await_main(stage)

    def _await_main(self, stage: str) -> None:
        turns.await_main(turns.next_turn(), stage, self.deadline_s)
        self.barrier(stage)

    def close(self) -> None:
        """Leave the process group. Harmless where there is none."""
        if self.world > 1 and dist.is_initialized():
            watch.stop()
            for forget in at_close:
                forget()
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
        dist.init_process_group("nccl", timeout=_patience("nccl", deadline_s))
    else:
        dist.init_process_group("gloo", timeout=_patience("gloo", deadline_s))


def _patience(backend: str, deadline_s: float) -> timedelta:
    """When a group itself ends a wait. NCCL says less of it than `watch`, and so comes after that."""
    return timedelta(seconds=deadline_s + (NCCL_LATER_S if backend == "nccl" else 0.0))


def _gloo(members: Sequence[int], deadline_s: float) -> Any:
    return dist.new_group(list(members), backend="gloo", timeout=timedelta(seconds=deadline_s))


def _groups(rank: int, layout: Layout, deadline_s: float) -> dict[str, Any]:
    """The groups of this process. All processes make all groups, in one order."""
    found: dict[str, Any] = {}
    for place in range(layout.tensor):
        members = [layout.tensor * share + place for share in range(layout.data)]
        tensors = dist.new_group(members, timeout=_patience(dist.get_backend(), deadline_s))
        objects = _gloo(members, deadline_s)
        if rank in members:
            found |= {"data_group": tensors, "data_control": objects}
    for share in range(layout.data):
        members = [layout.tensor * share + place for place in range(layout.tensor)]
        group = _gloo(members, deadline_s)
        if rank in members:
            found["peers"] = group
    return found


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
