"""Checks of the rollout suite: whose weights an engine answers with, and since when."""

from __future__ import annotations

import gc

import pytest

from posttune.errors import PosttuneError
from posttune.testing._rollout_base import GREEDY, RolloutChecks
from posttune.testing._rollout_bench import Bench, digest_of, requests, tokens
from posttune.types import Sampling

LOADS = 50


class WeightChecks(RolloutChecks):
    """Of loads, checksums and caches."""

    # --- whose weights -----------------------------------------------------------------------

    def test_new_weights_count_after_a_load_and_never_before(self, bench: Bench) -> None:
        """Answers and their version follow the load, not the trainer's tensors."""
        before = bench.answer(requests(), GREEDY)
        bench.set(bench.other(1), send=False)
        if not bench.engine.info.shares_weights:
            self.assert_same(bench.answer(requests(), GREEDY), before)
        bench.send()
        after = bench.answer(requests(), GREEDY)
        assert tokens(after) != tokens(before)
        self.assert_greedy(bench, after)
        assert {answer.weight_version for answer in before} == {bench.version - 1}
        assert {answer.weight_version for answer in after} == {bench.version}
        bench.reset()
        self.assert_same(bench.answer(requests(), GREEDY), before)

    def test_every_tensor_arrives(self, bench: Bench) -> None:
        """Checksums are those of the tensors that were handed over: after the first load and any other."""
        for weights in (bench.original, bench.other(2), bench.original):
            bench.set(weights)
            sums = bench.engine.checksums()
            wanted = {name: digest_of(tensor) for name, tensor in bench.weights().items()}
            assert {name: sums.get(name) for name in wanted} == wanted

    def test_one_tensor_that_changes_is_seen(self, bench: Bench) -> None:
        """Each kind of tensor reaches the engine: a change of it alone moves the log-probabilities."""
        for name in bench.kinds_of_tensor():
            bench.set({name: bench.other(3)[name]})
            self.assert_agrees(bench, bench.answer(requests()[:3], Sampling(n=2, max_new_tokens=6)), 1.0)
            bench.set({name: bench.original[name]}, send=False)
        bench.reset()

    def test_no_stale_cache(self, bench: Bench) -> None:
        """A prompt that comes again after a load is computed anew, however well its prefix was kept."""
        asked = requests(["The same long beginning. " * 12 + end for end in ("A", "B", "C")])
        for _ in range(2):
            bench.answer(asked, GREEDY)
        bench.set(bench.other(4))
        answers = bench.answer(asked, GREEDY)
        self.assert_greedy(bench, answers)
        self.assert_agrees(bench, answers, 0)
        bench.reset()

    def test_equal_weights_change_nothing(self, bench: Bench) -> None:
        """Learning rate 0: the same weights again and again, the same answers and log-probabilities."""
        first = bench.answer(requests(), GREEDY)
        for _ in range(4):
            bench.send()
            again = bench.answer(requests(), GREEDY)
            self.assert_same(again, first)
            if not self.batch_independent:
                self.assert_agrees(bench, again, 0)
                continue
            for a, b in zip(again, first, strict=True):
                assert all(abs(x - y) < 1e-5 for x, y in zip(a.logprobs or (), b.logprobs or (), strict=True))

    def test_other_weights_are_refused(self, bench: Bench) -> None:
        """An unknown name, a missing tensor and a wrong shape each raise; a good load mends all."""
        good = list(bench.weights().items())
        name, tensor = good[3]
        renamed = [*good[:3], (name + "x", tensor), *good[4:]]
        cut = [*good[:3], (name, tensor[:-1]), *good[4:]]
        missing = [*good[:3], *good[4:]]
        for tensors in [renamed] if bench.engine.info.shares_weights else [renamed, cut, missing]:
            with pytest.raises(PosttuneError):
                bench.engine.load_weights(iter(tensors), bench.version)
        bench.send()
        self.assert_greedy(bench, bench.answer(requests(), GREEDY))

    def test_merged_adapters(self, bench: Bench) -> None:
        """What a LoRA trainer hands over is the merged model."""
        if bench.engine.info.shares_weights:
            return
        merged, tensors = bench.merged_adapters()
        bench.version += 1
        bench.engine.load_weights(tensors, bench.version)
        answers = bench.answer(requests(), GREEDY)
        self.assert_greedy(bench, answers, merged)
        bench.send()  # the engine alone had the merged ones

    def test_memory_stays_flat_over_loads(self, bench: Bench) -> None:
        """Of this process, of the engine's and of the accelerator, over LOADS loads."""
        sizes = []
        for count in (LOADS, LOADS):
            for _ in range(count):
                bench.send()
            bench.answer(requests(), GREEDY)
            gc.collect()
            sizes.append(bench.memory())
        grown = {kind: (sizes[1][kind] - sizes[0][kind]) / 2**20 for kind in sizes[0]}
        assert max(grown.values()) < self.growth_mb, grown
