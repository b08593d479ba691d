"""What every executor does alike: policies for errors, order, side by side, cache, refusals."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from posttune.config.base import PluginRef, RewardRef
from posttune.errors import PluginCallError, PluginReturnError, RunError, UserError
from posttune.execution.scorer import Scorer
from posttune.facade import Rewards, build_rewards
from posttune.hookspecs import hookimpl
from posttune.pipeline import bind
from posttune.types import Needs, Sample
from pydantic import ValidationError
from rewards_for_tests import made, samples, write

pytestmark = pytest.mark.slow

EXECUTORS = ("inline", "thread", "process")
FUNCTIONS = ("sync", "later")


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_a_reward_cannot_score_follows_its_policy(tmp_path: Path, executor: str, function: str) -> None:
    batch = samples("one", "none", "nan", "raise", "text", "true", "exit", "last")
    masked = made(tmp_path, function, executor=executor, on_error="mask")
    assert masked.score(batch) == {"odd": [1.0, None, None, None, None, None, None, 1.0]}
    stats = masked.stats["odd"]
    assert (stats.scored, stats.unscorable, stats.nan, stats.errors, stats.timeouts) == (2, 6, 1, 4, 0)
    assert stats.failed == {3, 4, 5, 6}
    valued = made(tmp_path, function, executor=executor, on_error="value", value=-1.0)
    assert valued.score(batch) == {"odd": [1.0, None, None, -1.0, -1.0, -1.0, -1.0, 1.0]}
    raising = made(tmp_path, function, executor=executor)
    with pytest.raises(PluginCallError, match=r"\[odd\].*ValueError: bad gold.*sample s1"):
        raising.score(samples("one", "raise"))
    with pytest.raises(PluginReturnError, match="str 'good' for sample s1"):
        raising.score(samples("one", "text"))
    assert raising.score(samples("none", "one")) == {"odd": [None, 1.0]}
    for each in (masked, valued, raising):
        each.close()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_reward_of_all_samples_is_called_once_with_all(tmp_path: Path, executor: str) -> None:
    rewards = made(tmp_path, "whole", executor=executor, on_error="mask")
    assert rewards.score(samples("one", "nan", "two")) == {"odd": [1.0, None, 1.0]}
    assert rewards.score(samples("one", "raise")) == {"odd": [None, None]}
    assert rewards.stats["odd"].errors == 2
    assert rewards.score([]) == {"odd": []}


@pytest.mark.parametrize(
    ("executor", "function"), [("thread", "slow"), ("process", "slow"), ("inline", "slow_later")]
)
def test_workers_score_side_by_side(tmp_path: Path, executor: str, function: str) -> None:
    log = tmp_path / "log"
    rewards = made(tmp_path, function, executor=executor, workers=4)
    rewards.score(samples("warm", log=str(tmp_path / "warm")))
    rewards.score(samples(*"abcdefgh", log=str(log)))
    spans = [json.loads(line) for line in log.read_text().splitlines()]
    events = sorted([(began, 1) for began, _ in spans] + [(ended, -1) for _, ended in spans])
    at_once = [sum(step for _, step in events[: i + 1]) for i in range(len(events))]
    assert len(spans) == 8
    assert max(at_once) == 4
    assert rewards.stats["odd"].seconds < 8 * 0.2


def test_rewards_run_side_by_side_and_off_the_main_thread(tmp_path: Path) -> None:
    path = tmp_path / "meet.py"
    path.write_text(
        "import threading\nbarrier = threading.Barrier(2)\n"
        "def a(response):\n    barrier.wait(20)\n    return 1\n"
        "def b(response):\n    barrier.wait(20)\n    return 2\n"
    )
    refs = [PluginRef(name="function", label=each, options={"path": f"{path}:{each}"}) for each in "ab"]
    assert build_rewards(refs).score(samples("x")) == {"a": [1.0], "b": [2.0]}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_scoring_can_be_begun_and_waited_for_later(tmp_path: Path, executor: str) -> None:
    rewards = made(tmp_path, executor=executor)
    begun = rewards.submit(samples("one", "none"))
    assert begun.result() == begun.result() == {"odd": [1.0, None]}
    assert rewards.stats["odd"].scored == 1
    with pytest.raises(PluginCallError, match="bad gold"):
        rewards.submit(samples("raise")).result()


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_it_works_off_the_main_thread(tmp_path: Path, executor: str) -> None:
    rewards = made(tmp_path, executor=executor, workers=1, timeout=0.3)
    found: list[object] = []
    work = threading.Thread(target=lambda: found.append(rewards.score(samples("hang", "thread"))))
    work.start()
    work.join(60)
    assert found == [{"odd": [None, float(executor == "process")]}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "function"),
    [("thread", "sync"), ("process", "sync"), ("inline", "later"), ("process", "later")],
)
def test_time_limits(tmp_path: Path, executor: str, function: str) -> None:
    hung = samples("hang", "hang", "one", "hang", "hang", "two")
    rewards = made(tmp_path, function, executor=executor, workers=2, timeout=1.0)
    assert rewards.score(hung) == {"odd": [None, None, 1.0, None, None, 1.0]}
    stats = rewards.stats["odd"]
    assert (stats.timeouts, stats.errors, stats.scored) == (4, 0, 2)
    assert stats.slowest in {"s0", "s1", "s3", "s4"}
    valued = made(tmp_path, function, executor=executor, workers=2, timeout=1.0, on_error="value", value=0.0)
    assert valued.score(hung) == {"odd": [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]}
    batch = made(tmp_path, function, executor=executor, workers=1, timeout=60.0, batch_timeout=6.0)
    assert batch.score(samples("one", "hang", "two")) == {"odd": [1.0, None, None]}
    assert batch.stats["odd"].timeouts == 2
    assert batch.score(samples("one")) == {"odd": [1.0]}
    for each in (rewards, valued, batch):
        each.close()


def test_a_batch_that_takes_too_long_inline_is_cut_between_samples(tmp_path: Path) -> None:
    rewards = made(tmp_path, "slow", batch_timeout=0.3)
    found = rewards.score(samples(*"abcdefgh", log=str(tmp_path / "log")))["odd"]
    assert found[0] == 1.0
    assert found[-1] is None
    assert rewards.stats["odd"].timeouts == found.count(None)


def test_too_many_hanging_threads_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttune.execution.threads.MOST_LEFT_BEHIND", 2)
    rewards = made(tmp_path, executor="thread", workers=2, timeout=0.1)
    with pytest.raises(RunError, match="3 calls hang in threads, which cannot be killed"):
        rewards.score(samples(*["hang"] * 6))


def test_threads_say_once_that_they_cannot_be_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttune.execution.threads._said", threading.Event())
    for _ in range(2):
        made(tmp_path, executor="thread").score(samples("one"))
    assert [record.message for record in caplog.records if "no thread can be killed" in record.message]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_cache_goes_by_content(tmp_path: Path, executor: str) -> None:
    rewards = made(tmp_path, "counted", executor=executor, cache=2)
    calls = tmp_path / "calls"
    assert rewards.score(samples("a", "bb", "a", "a", level=1))["odd"] == [2.0, 3.0, 2.0, 2.0]
    assert sorted(calls.read_text().split()) == ["a", "bb"]
    assert rewards.stats["odd"].cached == 2
    assert rewards.score(samples("a", level=1, unread=5))["odd"] == [2.0]
    assert rewards.score(samples("a", level=2))["odd"] == [3.0]
    assert sorted(calls.read_text().split()) == ["a", "a", "bb"]
    rewards.score(samples("bb", level=1))  # the bound of 2 has given it up
    assert len(calls.read_text().split()) == 4


def test_failures_are_not_cached(tmp_path: Path) -> None:
    rewards = made(tmp_path, on_error="mask", cache=10)
    assert rewards.score(samples("raise", "none")) == {"odd": [None, None]}
    rewards.score(samples("raise", "none"))
    assert (rewards.stats["odd"].errors, rewards.stats["odd"].cached) == (1, 1)


def test_a_column_without_exact_text_is_scored_each_time(tmp_path: Path) -> None:
    path = tmp_path / "f.py"
    path.write_text("def f(response, vector): return float(vector.sum())")
    ref = RewardRef(name="function", options={"path": f"{path}:f"}, cache=5)
    rewards = build_rewards([ref])
    for _ in range(2):
        assert rewards.score(samples("a", vector=np.ones(3)))["function"] == [3.0]
        assert rewards.stats["function"].cached == 0


@pytest.mark.parametrize(
    ("function", "execution", "words"),
    [
        ("sync", {"timeout": 1.0}, "cannot be stopped, so no timeout holds"),
        ("sync", {"workers": 2}, "workers has no effect with executor: inline"),
        ("whole", {"batch_timeout": 1.0}, "cannot be stopped"),
        ("whole", {"cache": 5}, "scores all samples at once"),
    ],
)
def test_what_could_not_hold_is_refused(
    tmp_path: Path, function: str, execution: dict[str, object], words: str
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        made(tmp_path, function, **execution)
    assert "reward 'odd'" in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"on_error": "value"},
        {"value": 1.0},
        {"memory_mb": 100},
        {"executor": "fork"},
        {"workers": 0},
        {"timeout": 0.0},
        {"cache": -1},
    ],
)
def test_fields_that_do_not_fit_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RewardRef(name="gsm8k", **fields)


def test_every_field_of_a_reference_reaches_the_scorer(tmp_path: Path) -> None:
    rewards = made(tmp_path, executor="thread", workers=3, timeout=2.0, cache=7)
    (scorer,) = rewards._scorers
    assert isinstance(scorer, Scorer)
    assert (scorer.ref.workers, scorer.ref.timeout, scorer.ref.cache) == (3, 2.0, 7)
    assert scorer.side_by_side


def test_seconds_are_of_samples(tmp_path: Path) -> None:
    path = tmp_path / "f.py"
    path.write_text("import time\ndef f(response): time.sleep(0.1 * (response == 'slow')); return 1")
    ref = RewardRef(name="function", options={"path": f"{path}:f"}, executor="thread", workers=1)
    rewards = build_rewards([ref])
    rewards.score(samples("a", "slow", "b"))
    stats = rewards.stats["function"]
    assert stats.slowest == "s1"
    assert stats.seconds_p50 <= stats.seconds_p95 <= stats.seconds_max <= stats.seconds
    assert stats.seconds_max >= 0.1


def test_the_sample_of_another_reward_is_untouched(tmp_path: Path) -> None:
    write(tmp_path)
    refs = [
        RewardRef(
            name="function",
            label="odd",
            options={"path": f"{tmp_path}/odd_rewards.py:sync"},
            executor="process",
            timeout=0.3,
        ),
        PluginRef(name="length", options={"limit": 10, "unit": "characters"}),
    ]
    began = time.monotonic()
    found = build_rewards(refs).score([Sample("a", 0, "", "hang"), Sample("b", 0, "", "one")])
    assert found == {"odd": [None, 1.0], "length": [1.0, 1.0]}
    assert time.monotonic() - began < 60


def test_a_closure_runs_in_a_thread_and_is_refused_in_a_process() -> None:
    class Closure:
        @hookimpl
        def reward_needs(self) -> Needs:
            return Needs(each=True)

        @hookimpl
        def reward_score(self, samples: list[Sample]) -> list[float]:
            return [hang() for _ in samples]

    event = threading.Event()

    def hang() -> float:
        event.wait(60)
        return 1.0

    member = bind("reward", Closure(), "closure")
    fields = {"name": "closure", "options": {"path": f"{__name__}:{hang.__qualname__}"}, "timeout": 0.3}
    rewards = Rewards([member], [RewardRef(**fields, executor="thread")])
    assert rewards.score(samples("a", "b")) == {"closure": [None, None]}
    event.set()
    assert rewards.score(samples("a", "b")) == {"closure": [1.0, 1.0]}
    with pytest.raises(UserError, match="is made as the script runs: no other process has it"):
        Rewards([member], [RewardRef(**fields, executor="process")])
