"""What a checkpoint of a training stage holds, and how a stage goes on from one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from posttune.checkpoint import store
from posttune.checkpoint.parts import MAIN, Part, tensors_of
from posttune.checkpoint.saver import Saver
from posttune.checkpoint.space import shortage
from posttune.checkpoint.writing import Draft, begin
from posttune.config.models import RewardModelStage, RlStage, SftStage
from posttune.distributed.ranks import Ranks
from posttune.errors import CheckpointError, PosttuneError
from posttune.models.load import LoadedModel
from posttune.run.resume import changes, stage_settings
from posttune.run.stages import StageContext
from posttune.trainer.loop import Position

MAY_CHANGE = frozenset({"checkpoint", "memory"})


log = logging.getLogger("posttune.trainer")


class Stateful(Protocol):
    """What has a state of its own, as JSON data."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from ``state``."""


@dataclass
class Checkpoints:
    """Writes the checkpoints of a stage and finds the one to go on from.

    The state is JSON: stage, position, what the work keeps, and what must not change in between (the
    stage's configuration, the run's seed, the data's fingerprint).
    """

    context: StageContext
    config: SftStage | RewardModelStage | RlStage
    loaded: LoadedModel
    optimizer: torch.optim.Optimizer
    work: Stateful
    data_fingerprint: str
    parts: Mapping[str, Part] = field(default_factory=dict)  # models beside the main one, by name

    def __post_init__(self) -> None:
        self._saver = Saver(self.context.ranks, self.config.checkpoint.async_save)
        self._best: set[int] = set()

    @property
    def folder(self) -> Path:
        """Holds the checkpoints of the run."""
        return self.context.folder.checkpoints

    def save(self, position: Position) -> Path:
        """Write a checkpoint, or begin to; its path. Every rank calls it. Raises `CheckpointError`."""
        self._best = {position.best_step} if position.best else set()
        return self._saver.save(lambda background: self._begin(position, background))

    def written(self, wait: bool) -> list[Path]:
        """The checkpoints that have become whole since the last call; older ones then give way.

        ``wait``: return once nothing is being written. Every rank calls it. Raises `CheckpointError`.
        """
        if wait:
            self._saver.wait()
        else:
            self._saver.poll()
        paths = self._saver.collect()
        if paths and self.config.checkpoint.keep_last is not None and self.context.ranks.main:
            store.prune(self.folder, self.config.checkpoint.keep_last, self._best)
        return paths

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """When the block fails, what is being written is written to its end; a second Ctrl-C leaves it."""
        try:
            yield
        except Exception:  # whatever it is: it is raised again below
            try:
                self.written(wait=True)
            except PosttuneError as error:  # also of processes that are gone: the first error is the cause
                log.warning("%s", error)
            raise

    def check_room(self) -> None:
        """Raise `CheckpointError` where the disk cannot hold even the weights of one checkpoint."""
        parts = {MAIN: Part(self.loaded.model, None, self.loaded.base)}
        parts |= {name: Part(part.model, None, part.base) for name, part in self.parts.items()}
        needed = sum(tensor.nbytes for tensor in tensors_of(parts).values())
        what = self.context.ranks.broadcast_object(shortage(self.folder, needed))
        if what:
            fix = "make room before training begins, or choose another output:"
            raise CheckpointError(f"a checkpoint would not fit: {what}", who=str(self.folder), fix=fix)

    def _begin(self, position: Position, background: Ranks | None) -> Draft:
        return begin(
            self.folder,
            position.global_step,
            model=self.loaded.model,
            optimizer=self.optimizer,
            state=self._state(position),
            tokenizer=self.loaded.tokenizer,
            config=self.context.run.told(),
            ranks=self.context.ranks,
            base=self.loaded.base,
            parts=self.parts,
            copy=background is not None,
            background=background,
        )

    def restore(self) -> Position:
        """Load the last whole checkpoint where it is of this stage, and say where the stage begins."""
        path = store.latest(self.folder)
        if path is None:
            return Position()
        state = store.read_state(path)
        if state.get("stage") != self.context.name:
            return Position(base=store.step_of(path))
        self._check(path, state)
        store.load(
            path,
            model=self.loaded.model,
            optimizer=self.optimizer,
            ranks=self.context.ranks,
            parts=self.parts,
        )
        self.work.load_state(state["work"])
        return Position(**state["position"])

    def _state(self, position: Position) -> dict[str, Any]:
        return {
            "stage": self.context.name,
            "step": position.step,
            "global_step": position.global_step,
            "position": asdict(position),
            "data_fingerprint": self.data_fingerprint,
            "config": self._fixed_config(),
            "work": self.work.state(),
        }

    def _fixed_config(self) -> dict[str, Any]:
        settings = stage_settings(self.context.run, self.context.name)
        return {key: value for key, value in settings.items() if key not in MAY_CHANGE}

    def _check(self, path: Path, state: Mapping[str, Any]) -> None:
        who = f"checkpoint {path}"
        if not self.context.resume:
            fix = "add --resume to go on from it, or choose another output folder"
            raise CheckpointError(
                f"the run folder holds one of stage {self.context.name!r}", who=who, fix=fix
            )
        if state["data_fingerprint"] != self.data_fingerprint:
            fix = "put back the data that it was trained on, or start a new run"
            raise CheckpointError("the training data has changed since it was written", who=who, fix=fix)
        changed = changes(state["config"], self._fixed_config())
        if changed:
            fix = "put the values back, or start a new run"
            raise CheckpointError(f"the configuration has changed: {'; '.join(changed)}", who=who, fix=fix)
