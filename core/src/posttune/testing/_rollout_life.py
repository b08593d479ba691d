"""Checks of the rollout suite: sleep, stop, death, side effects, and training with the engine."""

from __future__ import annotations

import threading
import time

import psutil
import pytest

from posttune.errors import PosttuneError
from posttune.testing._rollout_base import GREEDY, RolloutChecks
from posttune.testing._rollout_bench import CONTEXT, Bench, requests
from posttune.testing._rollout_runs import run
from posttune.types import Request, Sampling


class LifeChecks(RolloutChecks):
    """Of what an engine does beside answering."""

    # --- how it behaves ----------------------------------------------------------------------

    def test_sleep_and_wake(self, bench: Bench) -> None:
        """Asleep it frees memory; awake, with the weights handed over again, it answers as before."""
        engine, before = bench.engine, bench.answer(requests(), GREEDY)
        assert engine.info.sleep == self.sleeps
        for _ in range(2):
            awake = bench.memory()
            engine.sleep()
            asleep = bench.memory()
            engine.wake("weights")
            bench.send()
            engine.wake("cache")
            self.assert_same(bench.answer(requests(), GREEDY), before)
            freed = awake.get("accelerator", 0) - asleep.get("accelerator", 0)
            assert freed >= self.sleep_frees_gb * 2**30
        bench.set(bench.other(5), send=False)
        engine.sleep()
        engine.wake("weights")
        bench.send()
        engine.wake("cache")
        self.assert_greedy(bench, bench.answer(requests(), GREEDY))
        bench.reset()

    def test_the_trainers_chance_is_untouched(self, bench: Bench) -> None:
        """Neither the start nor anything after it draws from the generators of this process."""
        bench.answer(requests(), Sampling(n=2, max_new_tokens=4))
        bench.send()
        assert bench.drew == []

    def test_nothing_on_standard_output(self, bench: Bench) -> None:
        """Standard output belongs to the command's result, in this process and the engine's."""
        bench.answer(requests(), GREEDY)
        assert bench.output == ""

    def test_stop(self, bench: Bench) -> None:
        """Twice is fine, its processes are gone, and another engine starts afterwards."""
        engine, processes = bench.engine, bench.processes
        assert bool(processes) == self.own_process
        bench.close()
        engine.stop()
        until = time.monotonic() + self.deadline_s
        while any(_runs(each) for each in processes) and time.monotonic() < until:
            time.sleep(0.1)
        assert not [each for each in processes if _runs(each)]
        self.assert_greedy(bench, bench.answer(requests(), GREEDY))

    def test_tied_embeddings(self, bench: Bench) -> None:
        """One tensor at both ends of the model: new weights count at both."""
        with self.alone(bench, "tied", tie=True) as tied:
            assert "lm_head.weight" not in tied.weights()
            for weights in (tied.original, tied.other(6), tied.original):
                tied.set(weights)
                answers = tied.answer(requests(), GREEDY)
                self.assert_greedy(tied, answers)
                self.assert_agrees(tied, answers, 0)

    def test_learning_rate_0(self, bench: Bench) -> None:
        """A GRPO run that learns nothing: the likeliest answers stay as they are."""
        bench.close()
        ran = run(self, bench.folder.parent / "grpo", lr=0.0, steps=3, n=2, top_k=1)
        assert len(ran.answers) == 8
        for answers in ran.answers.values():
            assert len(answers) == 6
            if self.exact:
                assert len(set(answers)) == 1

    def test_longer_is_better(self, bench: Bench) -> None:
        """A GRPO run of 20 steps: answers grow with the reward, and engine and trainer agree throughout."""
        bench.close()
        ran = run(self, bench.folder.parent / "grpo", lr=5e-4, steps=20, n=8)
        lengths = ran.lengths()
        assert sum(lengths[-3:]) / 3 > sum(lengths[:3]) / 3 + 2, lengths
        name = f"rollout/logprob_gap_{'max' if self.exact else 'mean'}"
        gaps = [line[name] for line in ran.metrics if name in line]  # none where all rewards are equal
        assert len(gaps) > 5
        assert max(gaps) < self.tolerance

    def test_a_killed_engine_ends_the_run(self, bench: Bench) -> None:
        """Whoever waits for its answer is told within deadline_s, and a stop still returns."""
        if not self.own_process:
            return
        with self.alone(bench) as doomed:
            asked = requests([str(number) for number in range(40)])
            doomed.answer(asked[:1], GREEDY)
            killer = threading.Timer(0.5, self.victim(doomed).kill)
            killer.start()
            began = time.monotonic()
            with pytest.raises(PosttuneError, match=r"(?i)process|died|exit|killed|signal"):
                _answer_for_long(doomed, asked, self.deadline_s)
            assert time.monotonic() - began < self.deadline_s + 1
            with pytest.raises(PosttuneError):
                doomed.answer(asked[:1], GREEDY)
            doomed.forget()
            assert time.monotonic() - began < 2 * self.deadline_s + 1


def _answer_for_long(bench: Bench, asked: list[Request], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        bench.answer(asked, Sampling(n=4, max_new_tokens=CONTEXT - 8))


def _runs(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != "zombie")
