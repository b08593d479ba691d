"""Saving in the background: the state is copied, training goes on, a thread writes the copy.

There is one write at a time: the next save waits for it. What goes wrong is raised by the next call.
A checkpoint still counts only once its marker is there, so that a process that dies in between leaves
the one before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from posttune.checkpoint.writing import Draft
from posttune.distributed.ranks import Ranks

Begin = Callable[[Ranks | None], Draft]
"""Makes a draft: of copies, to be completed by the ranks that are given; of the state itself for None."""


@dataclass
class _Write:
    """A draft that a thread completes."""

    draft: Draft
    error: BaseException | None = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.draft.complete()
        except BaseException as error:  # noqa: BLE001 (raised again by whoever collects it)
            self.error = error


@dataclass
class Saver:
    """Writes the checkpoints of a stage, at once or in the background. Every rank has one."""

    ranks: Ranks
    background: bool
    _group: Ranks | None = None
    _write: _Write | None = None
    _done: list[Path] = field(default_factory=list)

    def save(self, begin: Begin) -> Path:
        """Write a checkpoint, or begin to, once an earlier one is written; its path.

        Raises `CheckpointError`, also for the earlier one.
        """
        if not self.background:
            path = begin(None).complete()
            self._done.append(path)
            return path
        self.wait()
        draft = begin(self._own_ranks())
        self._write = _Write(draft)
        return draft.path

    def wait(self) -> None:
        """Return once nothing is being written. Raises `CheckpointError` where it could not be."""
        write, self._write = self._write, None
        if write is None:
            return
        write.thread.join()
        if write.error is not None:
            raise write.error
        self._done.append(write.draft.path)

    def poll(self) -> None:
        """Take note of a write that has ended. Every rank calls it, and every rank learns of a failure."""
        if not self.background:
            return
        ended = self._write is not None and not self._write.thread.is_alive()
        failed = ended and self._write is not None and self._write.error is not None
        if self.ranks.any(failed) or ended:
            self.wait()

    def collect(self) -> list[Path]:
        """The checkpoints that have become whole since this was last asked."""
        done, self._done = self._done, []
        return done

    def _own_ranks(self) -> Ranks:
        """The ranks with a process group that training does not use: groups are no place for two threads."""
        if self._group is None:
            control = None
            if self.ranks.world > 1:
                control = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.ranks.deadline_s))
            self._group = replace(self.ranks, control=control)
        return self._group
