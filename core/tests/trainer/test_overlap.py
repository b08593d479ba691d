"""Rewards are computed while the log-probabilities are: only what overlaps can finish here."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trainer_toy as toy
from posttune.errors import PosttuneError
from posttune.facade import Rewards
from posttune.trainer import rl_step
from posttune.types import Needs, Sample

pytestmark = pytest.mark.slow

WAITS = '''
import asyncio, pathlib, time

def _meets(event):
    """Say that scoring has begun, and wait for the passes; they wait for nothing else but this."""
    pathlib.Path(event + ".scoring").touch()
    for _ in range(2000):
        if pathlib.Path(event + ".passes").exists():
            return
        yield
    raise RuntimeError("no log-probability pass ran meanwhile")

def score(response, event):
    for _ in _meets(event):
        time.sleep(0.01)
    return sum(character.islower() for character in response) / 8

async def later(response, event):
    for _ in _meets(event):
        await asyncio.sleep(0.01)
    return sum(character.islower() for character in response) / 8

def free(response):
    return sum(character.islower() for character in response) / 8
'''


@pytest.fixture
def event(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The passes leave ``event.passes`` once scoring has begun."""
    path = tmp_path / "event"
    original = rl_step.token_logprobs

    def passes(*arguments: Any, **named: Any) -> Any:
        found = original(*arguments, **named)
        for _ in range(2000):
            if path.with_suffix(".scoring").exists():
                break
            time.sleep(0.01)
        else:
            raise AssertionError("no reward was begun before the passes")
        path.with_suffix(".passes").touch()
        return found

    monkeypatch.setattr(rl_step, "token_logprobs", passes)
    return path


def stage(task: Path, folder: Path, function: str, **fields: Any) -> dict[str, Any]:
    (folder / "waits.py").write_text(WAITS.replace("event):", f"event={str(folder / 'event')!r}):"))
    ref = {"name": "function", "options": {"path": f"{folder / 'waits.py'}:{function}"}}
    kl = {"where": "reward", "coef": 0.01}
    return toy.merged(toy.rl(task, kl=kl, steps=2), {"rewards": [ref | fields]})


@pytest.mark.parametrize(
    ("function", "executor"),
    [("score", "inline"), ("score", "thread"), ("score", "process"), ("later", "inline")],
)
def test_rewards_run_during_the_log_probability_passes(
    task: Path, tmp_path: Path, event: Path, function: str, executor: str
) -> None:
    with ExitStack() as stack:
        setup = toy.prepared(tmp_path / "run", stage(task, tmp_path, function, executor=executor), stack)
        (found,) = toy.take_steps(setup, 1)
    assert event.with_suffix(".passes").exists()
    assert found["time/reward_wait_s"] < found["time/reward_s"]


@pytest.mark.parametrize("where", ["reward", "loss", "none"])
def test_what_overlaps_changes_nothing(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    kl = {} if where == "none" else {"where": where, "coef": 0.01}
    one = stage(task, tmp_path, "free", executor="thread", workers=3)
    one = toy.merged(one, {"kl": kl or {"where": "none"}, "batch": {"mini_batches": 2}})
    toy.run_stage(tmp_path / "beside", one)
    submit = Rewards.submit

    def waits(self: Rewards, samples: list[Sample]) -> Any:
        scoring = submit(self, samples)
        scoring.result()
        return scoring

    monkeypatch.setattr(Rewards, "submit", waits)
    toy.run_stage(tmp_path / "before", one)
    toy.assert_same_run(tmp_path / "beside", tmp_path / "before", 2)


def test_a_failure_meanwhile_ends_the_step_and_its_workers(task: Path, tmp_path: Path) -> None:
    broken = stage(task, tmp_path, "missing_later", executor="process")
    source = "def missing_later(response):\n    raise ValueError('no gold')\n"
    (tmp_path / "waits.py").write_text(source)
    with ExitStack() as stack:
        setup = toy.prepared(tmp_path / "run", broken, stack)
        with pytest.raises(PosttuneError) as caught:
            toy.take_steps(setup, 1)
    message = str(caught.value)
    assert "waits.py:2 in missing_later" in message
    assert "row 1 of " in message
    assert "rows.jsonl" in message
    assert "no gold" in message


def test_batches_follow_one_another_and_devices_are_waited_for() -> None:
    from posttune.hookspecs import hookimpl
    from posttune.pipeline import bind

    calls: list[str] = []

    class Heavy:
        @hookimpl
        def reward_needs(self) -> Needs:
            return Needs(device=True)

        @hookimpl
        def reward_score(self, samples: list[Sample]) -> list[float]:
            calls.append(samples[0].response)
            return [1.0] * len(samples)

    rewards = Rewards([bind("reward", Heavy(), "heavy")])
    first, second = (rewards.submit([Sample(name, 0, "", name)]) for name in ("a", "b"))
    assert calls == []
    assert second.result() == {"heavy": [1.0]}
    assert calls == ["a", "b"]
    assert first.result() == {"heavy": [1.0]}
    assert first.seconds > 0
