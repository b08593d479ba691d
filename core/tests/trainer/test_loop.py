"""The loop: when it saves, what it tells whom and in which order, where it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from posttune.distributed.ranks import Ranks
from posttune.errors import Interrupted, RunError
from posttune.run.stages import InterruptFlag
from posttune.trainer.loop import Loop, Position, StepOutput


class Work:
    """Uses three rows a step; ``bad`` steps are not finite."""

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.bad = bad
        self.in_a_row = 0

    def step(self, position: Position) -> StepOutput:
        self.in_a_row = self.in_a_row + 1 if position.step + 1 in self.bad else 0
        return StepOutput({"loss": 1.0 / (position.step + 1)}, rows=3)

    def nonfinite_in_a_row(self) -> int:
        return self.in_a_row

    def state(self) -> dict[str, Any]:
        return {}


class Diary:
    """Observers and checkpoints that write down what they hear."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []

    def step(self, stage: str, step: int, metrics: dict[str, float]) -> None:
        self.entries.append(("step", stage, step, metrics["global_step"]))

    def checkpoint(self, path: Path, step: int) -> None:
        self.entries.append(("checkpoint", path.name, step))

    def save(self, position: Position) -> Path:
        self.entries.append(("save", position))
        return Path(f"global_step_{position.global_step}")

    def saved(self) -> list[int]:
        return [entry[1].step for entry in self.entries if entry[0] == "save"]


class Improving:
    """A validation every second step that is one better each time."""

    def __init__(self, goal: float) -> None:
        self.goal, self.value = goal, 0.0

    def due(self, step: int) -> bool:
        return step % 2 == 0

    def run(self) -> dict[str, float]:
        self.value += 1
        return {"val/accuracy": self.value}

    def reached(self, metrics: dict[str, float]) -> bool:
        return metrics.get("val/accuracy", 0.0) >= self.goal


def loop(diary: Diary, **fields: Any) -> Loop:
    known = {
        "stage": "sft",
        "work": Work(),
        "total_steps": 5,
        "save": diary.save,
        "save_every": 0,
        "validation": None,
        "observers": diary,
        "interrupt": InterruptFlag(),
        "ranks": Ranks(),
        "position": Position(base=10),
    }
    return Loop(**(known | fields))


def test_it_counts_rows_and_steps_and_saves_at_the_end() -> None:
    diary = Diary()
    made = loop(diary, total_steps=2)
    assert made.run() == {"loss": 0.5}
    end = Position(step=2, base=10, consumed=6)
    assert made.position == end
    assert diary.entries == [
        ("step", "sft", 1, 11),
        ("step", "sft", 2, 12),
        ("save", end),
        ("checkpoint", "global_step_12", 12),
    ]


@pytest.mark.parametrize(("every", "steps"), [(0, [5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5])])
def test_it_saves_every_so_many_steps_and_never_twice(every: int, steps: list[int]) -> None:
    diary = Diary()
    loop(diary, save_every=every).run()
    assert diary.saved() == steps


def test_it_stops_early_and_says_so_in_the_checkpoint() -> None:
    diary = Diary()
    made = loop(diary, validation=Improving(2.0), total_steps=99)
    made.run()
    assert made.position == Position(step=4, base=10, consumed=12, stopped=True)
    assert diary.entries[-2] == ("save", made.position)
    again = loop(Diary(), position=made.position)
    assert again.done
    assert again.run() == {}


def test_an_interrupt_ends_it_after_the_step() -> None:
    diary, flag = Diary(), InterruptFlag()
    flag.set()
    with pytest.raises(Interrupted, match="after step 1 of 5"):
        loop(diary, interrupt=flag).run()
    assert diary.saved() == [1]


def test_two_steps_that_are_not_finite_are_borne_and_three_are_not() -> None:
    loop(Diary(), work=Work(bad=(1, 2, 4, 5))).run()
    diary = Diary()
    with pytest.raises(RunError, match=r"not finite in 3 steps in a row"):
        loop(diary, work=Work(bad=(2, 3, 4))).run()
    assert diary.saved() == [4]


def test_other_ranks_save_and_keep_silent() -> None:
    diary = Diary()
    other = Ranks(rank=1, world=1)
    loop(diary, ranks=other).run()
    assert [entry[0] for entry in diary.entries] == ["save"]
