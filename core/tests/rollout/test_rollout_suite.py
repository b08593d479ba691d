"""The conformance suite over the `hf` engine: with the trainer's module, and with a copy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from posttune.testing._rollout_base import GREEDY
from posttune.testing._rollout_bench import Bench, requests
from posttune.testing.rollout_suite import RolloutSuite

pytestmark = pytest.mark.slow

torch.set_num_threads(1)


class TestLive(RolloutSuite):
    backend = "hf"


class TestCopy(RolloutSuite):
    backend = "hf"
    live = False

    @pytest.fixture(autouse=True)
    def left_as_found(self, bench: Bench) -> Iterator[None]:
        """Whichever check comes next finds the trainer's weights in the engine."""
        yield
        bench.reset()
        self.assert_greedy(bench, bench.answer(requests(), GREEDY))


@pytest.mark.slow
class TestRounded(RolloutSuite):
    backend = "hf"
    live = False
    dtype = "bfloat16"
