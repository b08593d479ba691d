"""The real engine beyond the rollout suite: loads that break off, choices, and starts that fail."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="needs the engine: make test-engines")

from posttune.errors import RunError, UserError
from posttune.testing.engine_tests import (
    ASKED,
    GREEDY,
    assert_likeliest,
    assert_mended,
    context,
    refused,
    started,
)
from posttune.testing.tiny import tiny_model
from posttune.types import Resources, Sampling
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.engine

engine, start_refused = partial(started, "sglang"), partial(refused, "sglang")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), hidden=256, heads=4)


def test_loads_and_choices_of_one_engine(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with engine(folder, bucket_mb=1, verify="always", logprobs="never") as made:
        answers = assert_mended(made, model)
        assert made.info.logprobs == "none"
        assert answers[0].logprobs is None
        with pytest.raises(UserError, match="need a tokenizer"):
            made.generate(ASKED, replace(GREEDY, stop=("x",)))
        one = made.generate(ASKED[:1], Sampling(n=3, top_k=1, max_new_tokens=4))
        assert_likeliest(model, one)
        with pytest.raises(RunError, match="takes no adapters"):
            made.load_weights(iter(()), 4, adapter="somewhere")


def test_starts_that_fail_say_why(folder: Path, tmp_path: Path) -> None:
    wrong = start_refused(folder, engine={"chunked_prefil_size": 1})
    assert "no argument 'chunked_prefil_size' (did you mean 'chunked_prefill_size'?)" in str(wrong)
    assert "decided by" in str(start_refused(folder, engine={"context_length": 9}))
    assert "the model takes 2048" in str(start_refused(folder, context(folder, max_length=4096)))
    split = context(folder, resources=Resources(tensor_parallel_size=2))
    assert "runs on a CPU" in str(start_refused(folder, split))
    odd = tiny_model(tmp_path / "odd")
    config = json.loads((odd / "config.json").read_text("utf-8"))
    config |= {"architectures": ["NoSuchForCausalLM"], "model_type": "no_such"}
    (odd / "config.json").write_text(json.dumps(config), "utf-8")
    unknown = start_refused(odd)
    assert isinstance(unknown, UserError)
    assert "does not know this model" in str(unknown)
