"""The real engine beyond the rollout suite: loads that break off, choices, and starts that fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs the engine: make test-engines")

import torch
from posttune.config.models import PluginRef
from posttune.errors import PosttuneError, RunError, UserError
from posttune.facade import RolloutEngine, build_rollout
from posttune.testing.tiny import tiny_model
from posttune.types import Completion, Request, Resources, RolloutContext, Sampling
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.engine

GREEDY = Sampling(temperature=0, max_new_tokens=8)
ASKED = [Request(f"r{i}", tuple(range(40 + i, 50)), 7 * i) for i in range(4)]


def context(folder: Path, **fields: Any) -> RolloutContext:
    plain = RolloutContext(folder, None, "float32", "cpu", 0, 64, Resources(max_sequences=8))
    return replace(plain, **fields)


@contextmanager
def engine(folder: Path, told: RolloutContext | None = None, **options: Any) -> Iterator[RolloutEngine]:
    with build_rollout(PluginRef(name="sglang", options=options)) as made:
        made.start(told or context(folder))
        yield made


def likeliest(model: Any, answers: list[Completion]) -> None:
    """Every token is the model's own argmax, or as good as it."""
    prompts = {request.id: request.prompt_ids for request in ASKED}
    for answer in answers:
        prompt = prompts[answer.request_id]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *answer.token_ids]]), use_cache=False).logits[0]
        rows = logits[len(prompt) - 1 : -1]
        chosen = rows.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert float((rows.max(-1).values - chosen).max()) < 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), hidden=256, heads=4)


def test_loads_and_choices_of_one_engine(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    good = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    assert sum(tensor.numel() for tensor in good.values()) > 3 << 18, "several buckets of a megabyte"
    with engine(folder, bucket_mb=1, verify="always", logprobs="never") as made:
        made.load_weights(iter(good.items()), 1)
        broken = [(name, good[name]) for name in list(good)[:-2]]
        broken.append(("model.nrom.weight", good["model.norm.weight"]))
        with pytest.raises(RunError, match=r"did you mean 'model\.norm\.weight'"):
            made.load_weights(iter(broken), 2)
        with pytest.raises(RunError, match="holds a mixture"):
            made.generate(ASKED, GREEDY)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        made.load_weights(iter(model.state_dict().items()), 3)
        answers = made.generate(ASKED, GREEDY)
        likeliest(model, answers)
        assert made.info.logprobs == "none"
        assert answers[0].logprobs is None
        with pytest.raises(UserError, match="need a tokenizer"):
            made.generate(ASKED, replace(GREEDY, stop=("x",)))
        one = made.generate(ASKED[:1], Sampling(n=3, top_k=1, max_new_tokens=4))
        likeliest(model, one)
        with pytest.raises(RunError, match="takes no adapters"):
            made.load_weights(iter(()), 4, adapter="somewhere")


def refused(folder: Path, told: RolloutContext | None = None, **options: Any) -> PosttuneError:
    with pytest.raises(PosttuneError) as caught, engine(folder, told, **options):
        pass
    assert "next: " in str(caught.value)
    return caught.value


def test_starts_that_fail_say_why(folder: Path, tmp_path: Path) -> None:
    wrong = refused(folder, engine={"chunked_prefil_size": 1})
    assert "no argument 'chunked_prefil_size' (did you mean 'chunked_prefill_size'?)" in str(wrong)
    assert "decided by" in str(refused(folder, engine={"context_length": 9}))
    assert "the model takes 2048" in str(refused(folder, context(folder, max_length=4096)))
    split = context(folder, resources=Resources(tensor_parallel_size=2))
    assert "runs on a CPU" in str(refused(folder, split))
    odd = tiny_model(tmp_path / "odd")
    config = json.loads((odd / "config.json").read_text("utf-8"))
    config |= {"architectures": ["NoSuchForCausalLM"], "model_type": "no_such"}
    (odd / "config.json").write_text(json.dumps(config), "utf-8")
    unknown = refused(odd)
    assert isinstance(unknown, UserError)
    assert "does not know this model" in str(unknown)
