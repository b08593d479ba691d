"""The rollout engine's state machine, and what a backend may answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from posttune import hookimpl
from posttune.errors import PluginCallError, PluginReturnError, RunError
from posttune.facade import RolloutEngine
from posttune.pipeline import bind
from posttune.types import BackendInfo, Completion, Request, RolloutContext, Sampling

CONTEXT = RolloutContext(None, None, "float32", "cpu", 0, 64)
REQUESTS = [Request("a", (1, 2), 0), Request("b", (3,), 1)]
SAMPLING = Sampling(n=2, max_new_tokens=3)
WEIGHTS = [("w", torch.zeros(1)), ("b", torch.zeros(1))]


class Minimal:
    """A backend with the required hooks only. ``change`` may alter what it generates."""

    def __init__(self, change: Callable[[list[Completion]], Any] = lambda answers: answers) -> None:
        self.change = change
        self.version = 0
        self.calls: list[str] = []

    @hookimpl
    def rollout_backend_start(self) -> BackendInfo:
        return BackendInfo("test", sleep=True, lora=False)

    @hookimpl
    def rollout_backend_generate(self, requests: Sequence[Request], sampling: Sampling) -> Any:
        return self.change(
            [
                Completion(each.id, index, (5, 6), (-0.5, -0.25), "stop", self.version)
                for each in requests
                for index in range(sampling.n)
            ]
        )

    @hookimpl
    def rollout_backend_load_weights(self, tensors: Iterable[Any], version: int) -> bool:
        self.calls.append(f"load {[name for name, _ in tensors]}")
        self.version = version
        return True

    @hookimpl
    def rollout_backend_stop(self) -> bool:
        self.calls.append("stop")
        return True


class Sleeper(Minimal):
    @hookimpl
    def rollout_backend_sleep(self) -> bool:
        self.calls.append("sleep")
        return True

    @hookimpl
    def rollout_backend_wake(self, part: str) -> bool:
        self.calls.append(f"wake {part}")
        return True

    @hookimpl
    def rollout_backend_checksums(self) -> dict[str, str]:
        return {"w": "00"}


def started(backend: Minimal | None = None) -> RolloutEngine:
    engine = RolloutEngine(bind("rollout_backend", backend or Minimal(), "test"))
    engine.start(CONTEXT)
    return engine


def test_a_round_of_the_machine() -> None:
    backend = Sleeper()
    with started(backend) as engine:
        assert engine.info.name == "test"
        assert len(engine.generate(REQUESTS, SAMPLING)) == 4
        engine.sleep()
        engine.wake("weights")
        engine.load_weights(WEIGHTS, version=1)
        engine.wake("cache")
        assert {answer.weight_version for answer in engine.generate(REQUESTS, SAMPLING)} == {1}
        assert engine.checksums() == {"w": "00"}
    engine.stop()
    assert backend.calls == ["sleep", "wake weights", "load ['w', 'b']", "wake cache", "stop"]


def refuse(engine: RolloutEngine, action: Callable[[RolloutEngine], object], words: str) -> None:
    with pytest.raises(RunError, match=words) as caught:
        action(engine)
    assert str(caught.value).startswith("rollout_backend 'test': ")


def test_calls_out_of_turn_are_refused() -> None:
    engine = RolloutEngine(bind("rollout_backend", Sleeper(), "test"))
    refuse(engine, lambda e: e.generate(REQUESTS, SAMPLING), "cannot generate while it is 'new'")
    refuse(engine, lambda e: e.info, "cannot ask for its abilities while it is 'new'")
    engine.start(CONTEXT)
    refuse(engine, lambda e: e.start(CONTEXT), "cannot start it while it is 'ready'")
    refuse(engine, lambda e: e.wake("weights"), "cannot wake its weights while it is 'ready'")
    engine.sleep()
    refuse(engine, lambda e: e.generate(REQUESTS, SAMPLING), "cannot generate while it is 'asleep'")
    refuse(engine, lambda e: e.load_weights(WEIGHTS, 1), "cannot load weights while it is 'asleep'")
    refuse(engine, lambda e: e.wake("cache"), "cannot wake its cache while it is 'asleep'")
    engine.wake("weights")
    refuse(engine, lambda e: e.wake("cache"), "before its weights are loaded")
    refuse(engine, lambda e: e.generate(REQUESTS, SAMPLING), "while it is 'half awake'")
    engine.stop()
    refuse(engine, lambda e: e.generate(REQUESTS, SAMPLING), "while it is 'stopped'")
    refuse(engine, lambda e: e.start(CONTEXT), "while it is 'stopped'")


def test_a_backend_that_cannot_sleep_stays_ready() -> None:
    backend = Minimal()
    with started(backend) as engine:
        engine.sleep()
        engine.wake("weights")
        engine.load_weights(WEIGHTS, version=3)
        engine.wake("cache")
        assert engine.version == 3
        assert engine.checksums() == {}
    assert backend.calls == ["load ['w', 'b']", "stop"]


def test_an_engine_that_never_started_is_not_stopped() -> None:
    backend = Minimal()
    with RolloutEngine(bind("rollout_backend", backend, "test")):
        pass
    assert backend.calls == []


def first(**changes: Any) -> Callable[[list[Completion]], Any]:
    return lambda answers: [replace(answers[0], **changes), *answers[1:]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda answers: None, "NoneType None, not a list of completions"),
        (lambda answers: answers[:3], "3 completions for 2 requests x 2 samples"),
        (lambda answers: answers[::-1], "the completion b/1 where a/0 belongs at position 0, request a"),
        (lambda answers: [*answers[:3], "text"], "str 'text', not a Completion, at position 3, request b"),
        (first(index=1), "the completion a/1 where a/0 belongs"),
        (first(finish_reason="eos"), "the finish reason 'eos'"),
        (first(weight_version=7), "weight version 7 with version 0 in use"),
        (first(token_ids=(1, 2, 3, 4)), "4 tokens with at most 3 allowed"),
        (first(token_ids=(1, -2)), "token ids that are not plain integers from 0"),
        (first(token_ids=(1, 2.0)), "token ids that are not plain integers from 0"),
        (first(logprobs=None), "no log-probabilities"),
        (first(logprobs=(-0.5,)), "1 log-probabilities for 2 tokens"),
        (first(logprobs=(-0.5, -math.inf)), "a log-probability that is not finite"),
        (first(logprobs=(-0.5, math.nan)), "a log-probability that is not finite"),
    ],
)
def test_what_a_backend_may_not_answer(change: Callable[[list[Completion]], Any], words: str) -> None:
    with started(Minimal(change)) as engine, pytest.raises(PluginReturnError) as caught:
        engine.generate(REQUESTS, SAMPLING)
    assert str(caught.value).startswith("rollout_backend 'test': rollout_backend_generate returned ")
    assert words in str(caught.value)


def test_logprobs_are_owed_only_where_they_were_asked_for() -> None:
    with started(Minimal(first(logprobs=None))) as engine:
        assert engine.generate(REQUESTS, replace(SAMPLING, logprobs=False))[0].logprobs is None


def test_no_requests_call_nobody() -> None:
    with started(Minimal(lambda answers: 1 / 0)) as engine:
        assert engine.generate([], SAMPLING) == []
        with pytest.raises(PluginCallError, match="ZeroDivisionError"):
            engine.generate(REQUESTS, SAMPLING)


def test_weights_are_taken_whole_and_never_go_back() -> None:
    class Hasty(Minimal):
        @hookimpl
        def rollout_backend_load_weights(self, tensors: Iterable[Any], version: int) -> bool:
            next(iter(tensors))
            return True

    with started() as engine:
        engine.load_weights(WEIGHTS, version=4)
        refuse(engine, lambda e: e.load_weights(WEIGHTS, version=3), "weights of version 3 after 4")
        refuse(engine, lambda e: e.load_weights(WEIGHTS, 5, adapter="x"), "takes no adapters")
    with started(Hasty()) as engine:
        with pytest.raises(PluginReturnError, match="after 1 tensors, with more to come"):
            engine.load_weights(WEIGHTS, version=1)
        assert engine.version == 0


def test_false_and_a_wrong_start_are_refused() -> None:
    class Unwilling(Minimal):
        @hookimpl
        def rollout_backend_stop(self) -> bool:
            return False

    class Nameless(Minimal):
        @hookimpl
        def rollout_backend_start(self) -> Any:
            return {"name": "test"}

    with pytest.raises(PluginReturnError, match="rollout_backend_stop returned False"):
        started(Unwilling()).stop()
    with pytest.raises(PluginReturnError, match="not BackendInfo"):
        started(Nameless())
