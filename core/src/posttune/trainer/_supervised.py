"""What the stages that learn from written answers have in common: one optimiser step a batch of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from posttune.config.models import RewardModelStage, SftStage
from posttune.data.dataset import SampleDataset
from posttune.data.sampler import PositionSampler
from posttune.distributed.ranks import Ranks
from posttune.trainer.loop import Position, StepOutput
from posttune.trainer.metrics import Meter, note_memory, reset_peak_memory
from posttune.trainer.optimizer import Stepper
from posttune.trainer.schedule import learning_rate

C = TypeVar("C", SftStage, RewardModelStage)
B = TypeVar("B")


@dataclass
class SupervisedWork(ABC, Generic[C, B]):
    """What such a stage does in a step. Every rank does it for its own share of the rows."""

    config: C
    total_steps: int
    model: torch.nn.Module
    dataset: SampleDataset
    sampler: PositionSampler
    stepper: Stepper
    ranks: Ranks

    @abstractmethod
    def read(self, position: Position) -> B:
        """This rank's share of the step's rows, and how many all ranks have. Raises DataError for none."""

    @abstractmethod
    def backward(self, batch: B, meter: Meter) -> torch.Tensor:
        """Add the gradients of the batch; returns its share of the step's loss, float64, a scalar."""

    def begin(self, position: Position) -> None:
        """Nothing to prepare."""

    def step(self, position: Position) -> StepOutput:
        """Take the step that begins at ``position``."""
        meter = Meter()
        reset_peak_memory(self.ranks.device)
        with meter.timed("step"):
            batch = self.read(position)
            lr = learning_rate(position.step, self.total_steps, self.config.optimizer)
            with meter.timed("update"):
                self._update(batch, lr, meter)
        meter.peak("lr", lr)
        note_memory(meter)
        metrics = meter.reduce(self.ranks)
        metrics["tokens_per_s"] = metrics.pop("update/tokens", 0.0) / metrics["time/step_s"]
        return StepOutput(metrics, self.config.batch_size)

    def drawn(self, position: Position) -> list[int]:
        """What the sampler gives all ranks in this step."""
        return self.sampler.indices(position.consumed, self.config.batch_size)

    def nothing(self) -> torch.Tensor:
        """A loss to add to."""
        return torch.zeros((), dtype=torch.float64, device=self.ranks.device)

    def _update(self, batch: B, lr: float, meter: Meter) -> None:
        self.model.train()
        self.stepper.begin(lr)
        total = float(self.ranks.sum(self.backward(batch, meter)))
        meter.mean("grad_norm", self.stepper.step(lr, total))
        meter.mean("loss", total)
        meter.peak("update/nonfinite_steps", int(self.stepper.in_a_row > 0))

    def nonfinite_in_a_row(self) -> int:
        """Optimiser steps skipped since the last that was taken."""
        return self.stepper.in_a_row

    def state(self) -> dict[str, Any]:
        """Nothing: everything follows from the position."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to take back."""
