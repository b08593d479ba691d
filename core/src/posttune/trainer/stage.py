"""What SFT and RL have in common around the loop: resume, report, leave a model."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from posttune.checkpoint.card import RunPlace
from posttune.checkpoint.gather import export_live
from posttune.checkpoint.parts import Part
from posttune.config.models import RewardModelStage, RlStage, SftStage
from posttune.errors import Interrupted
from posttune.memory.residence import resident
from posttune.models.load import LoadedModel
from posttune.rollout.requests import derive_seed
from posttune.run.stages import StageContext, StageResult
from posttune.trainer.loop import Check, Loop, Position, Work
from posttune.trainer.state import Checkpoints, Stateful
from posttune.types import Outcome, RunInfo

log = logging.getLogger("posttune.trainer")


class StageWork(Work, Stateful, Protocol):
    """The work of a stage, with its state."""

    def begin(self, position: Position) -> None:
        """Called once before the first step, when the weights are those of ``position``."""


@dataclass(frozen=True)
class Setup:
    """A stage that is ready to run."""

    config: SftStage | RewardModelStage | RlStage
    loaded: LoadedModel
    optimizer: torch.optim.Optimizer
    work: StageWork
    total_steps: int
    data_fingerprint: str
    validation: Check | None
    parts: Mapping[str, Part] = field(default_factory=dict)  # models beside the main one, by name


def train(setup: Setup, context: StageContext) -> StageResult:
    """Run a stage from its last checkpoint, or its beginning, to its end; leaves a Hugging Face folder."""
    started = time.perf_counter()
    checkpoints = checkpoints_of(setup, context)
    seed_generators(derive_seed(context.run.seed, context.name, context.ranks.data_rank))
    position = checkpoints.restore()
    checkpoints.check_room()
    setup.work.begin(position)
    loop = Loop(
        stage=context.name,
        work=setup.work,
        total_steps=setup.total_steps,
        save=checkpoints.save,
        save_every=setup.config.checkpoint.every,
        validation=setup.validation,
        observers=context.observers,
        interrupt=context.interrupt,
        ranks=context.ranks,
        position=position,
        keep_best=setup.config.checkpoint.best,
        written=checkpoints.written,
    )
    with reported(setup, context, loop), checkpoints.finishing():
        metrics = loop.run()
        output = _leave_model(setup, context)
    return StageResult(output, _summary(loop.position, metrics), time.perf_counter() - started)


def checkpoints_of(setup: Setup, context: StageContext) -> Checkpoints:
    """What writes and reads the checkpoints of a stage."""
    return Checkpoints(
        context, setup.config, setup.loaded, setup.optimizer, setup.work, setup.data_fingerprint, setup.parts
    )


def seed_generators(seed: int) -> None:
    """Seed what draws without a seed of its own: dropout, and rewards that use chance."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def reported(setup: Setup, context: StageContext, loop: Loop) -> Iterator[None]:
    """Tell the observers of the stage's beginning, and of its end however it comes."""
    info = RunInfo(
        folder=context.folder.path,
        name=context.run.name,
        stage=context.name,
        kind=setup.config.kind,
        total_steps=setup.total_steps,
        first_step=loop.position.step,
        config=context.run.told(),
        first_global_step=loop.position.global_step,
    )
    if context.ranks.main:
        context.observers.run_start(info)
    outcome = Outcome(context.name, "failed", loop.position.step, "ended by an unexpected error")
    try:
        yield
        outcome = Outcome(context.name, "finished", loop.position.step)
    except (Interrupted, KeyboardInterrupt) as error:
        outcome = Outcome(context.name, "interrupted", loop.position.step, str(error))
        raise
    except Exception as error:
        outcome = Outcome(context.name, "failed", loop.position.step, str(error))
        raise
    finally:
        if context.ranks.main:
            context.observers.run_end(outcome)


def _leave_model(setup: Setup, context: StageContext) -> Path:
    """Write the trained model where later stages find it."""
    destination = context.folder.model(context.name)
    with resident(setup.loaded.model):
        export_live(
            setup.loaded.model,
            setup.loaded.tokenizer,
            destination,
            context.ranks,
            replace=True,
            name=context.run.name,
            place=RunPlace(context.folder.path, context.name),
        )
    return destination


def _summary(position: Position, metrics: Mapping[str, float]) -> dict[str, Any]:
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    best = {f"best/{name}": value for name, value in position.best.items()}
    best |= {"best/global_step": position.best_step} if best else {}
    return {"steps": position.step, "global_step": position.global_step, **finite, **best}
