"""Whose weights the `hf` engine generates from, and when new ones count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from posttune.checkpoint.sources import open_source
from posttune.config.models import LoraConfig, PluginRef
from posttune.errors import RunError
from posttune.facade import RolloutEngine, build_rollout
from posttune.models.load import new_model
from posttune.models.lora import apply_lora, merge
from posttune.models.params import named_hf_tensors
from posttune.models.tokenizer import byte_tokenizer, save_tokenizer
from posttune.testing.tiny import tiny_model
from posttune.types import Request, Resources, RolloutContext, Sampling

GREEDY = Sampling(max_new_tokens=6, temperature=0)
REQUESTS = [Request(str(i), tuple(range(40 + i, 46 + i)), i) for i in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def start(folder: Path | None = None, live=None, dtype: str = "float32") -> RolloutEngine:
    engine = build_rollout(PluginRef(name="hf"))
    engine.start(RolloutContext(folder, None, dtype, "cpu", 0, 64, Resources(), live))
    return engine


def answers(engine: RolloutEngine) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in engine.generate(REQUESTS, GREEDY)]


def load(folder: Path, seed: int = 0) -> torch.nn.Module:
    """The folder's model, moved away from it."""
    model = open_source(folder).load_merged(dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.1
    return model


def test_a_copy_has_new_weights_after_a_load_and_never_before(folder):
    engine = start(folder)
    assert not engine.info.shares_weights
    first = answers(engine)
    model = load(folder)
    assert answers(engine) == first, "the trainer's module is not the engine's"
    engine.load_weights(named_hf_tensors(model), version=3)
    after = answers(engine)
    assert after == answers(start(live=model)) != first
    assert {c.weight_version for c in engine.generate(REQUESTS, GREEDY)} == {3}
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    assert answers(engine) == after, "tensors are copied, not kept"


def test_checksums_follow_the_tensor_that_changed(folder):
    engine = start(folder)
    model = open_source(folder).load_merged(dtype=torch.float32)
    before = engine.checksums()
    assert before == start(live=model).checksums()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    engine.load_weights(named_hf_tensors(model), version=1)
    after = engine.checksums()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"model.layers.1.mlp.up_proj.weight"}
    assert before.keys() == after.keys() == dict(named_hf_tensors(model)).keys()


def _renamed(tensors):
    return [(name.replace("up_proj", "upproj"), tensor) for name, tensor in tensors]


def _cut(tensors):
    return [*tensors[:-1], (tensors[-1][0], tensors[-1][1][:-1])]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            _renamed,
            r"no tensor 'model.layers.0.mlp.upproj.weight' \(did you mean 'model.layers.0.mlp.up_proj",
        ),
        (_cut, r"'lm_head.weight' has shape \[258, 64\], the model wants \[259, 64\]"),
        (lambda tensors: tensors[:-2], r"2 of 21 tensors are missing \(model.norm.weight, lm_head.weight\)"),
        (lambda tensors: [*tensors, tensors[0]], "'model.embed_tokens.weight' was given twice"),
        (lambda tensors: [], "21 of 21 tensors are missing"),
    ],
)
def test_all_tensors_or_none(folder, spoil, message):
    engine = start(folder)
    before = engine.checksums(), answers(engine)
    with pytest.raises(RunError, match=message) as caught:
        engine.load_weights(spoil(list(named_hf_tensors(load(folder)))), version=1)
    assert "nothing was loaded" in str(caught.value)
    assert (engine.checksums(), answers(engine)) == before
    assert engine.generate(REQUESTS, GREEDY)[0].weight_version == 0


def test_a_live_model_is_never_stale(folder):
    model = load(folder)
    engine = start(live=model)
    assert engine.info.shares_weights
    assert answers(engine) == answers(start(live=model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()
    assert answers(engine) == answers(start(live=model))
    engine.load_weights(named_hf_tensors(model), version=1)
    engine.load_weights([], version=2)
    assert engine.generate(REQUESTS, GREEDY)[0].weight_version == 2


def test_a_live_model_still_checks_names(folder):
    engine = start(live=load(folder))
    with pytest.raises(RunError, match=r"no tensor 'model\.embed\.weight'"):
        engine.load_weights([("model.embed.weight", torch.zeros(1))], version=1)
    assert engine.generate(REQUESTS, GREEDY)[0].weight_version == 0


def test_lora_weights_reach_a_copy_merged(folder):
    adapted = apply_lora(open_source(folder).load_merged(dtype=torch.float32), LoraConfig(rank=4), seed=0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    engine = start(folder)
    first = answers(engine)
    engine.load_weights(named_hf_tensors(adapted), version=1)
    assert answers(engine) == answers(start(live=merge(adapted))) != first
    start(live=adapted).load_weights(named_hf_tensors(adapted), version=1)


def test_tied_weights_go_by_either_name(tmp_path):
    folder = tiny_model(tmp_path, tie=True)
    model = load(folder)
    tensors = dict(named_hf_tensors(model))
    assert "lm_head.weight" not in tensors
    for given in (tensors, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}):
        engine = start(folder)
        engine.load_weights(given.items(), version=1)
        assert answers(engine) == answers(start(live=model))


def test_fused_experts_are_taken_by_their_names_in_files(tmp_path):
    fields = {
        "model_type": "qwen3_moe",
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    words = byte_tokenizer()
    new_model(fields, words, seed=0).save_pretrained(tmp_path)
    save_tokenizer(words, tmp_path)
    model = load(tmp_path)
    tensors = list(named_hf_tensors(model))
    assert any(name.endswith("experts.3.up_proj.weight") for name, _ in tensors)
    engine = start(tmp_path)
    engine.load_weights(tensors, version=1)
    assert engine.checksums() == start(live=model).checksums()
    assert answers(engine) == answers(start(live=model))


def test_a_copy_has_the_type_that_is_asked_for(folder):
    engine = start(folder, dtype="bfloat16")
    assert engine.info.details["dtype"] == "bfloat16"
    engine.load_weights(named_hf_tensors(load(folder)), version=1)
    assert len(answers(engine)) == 3


def test_an_adapter_alone_is_refused(folder):
    with pytest.raises(RunError, match="adapter"):
        start(folder).load_weights([], version=1, adapter="default")


def test_neither_folder_nor_model(folder):
    with pytest.raises(RunError, match="neither a model folder nor a live model"):
        start()


def test_stopping_twice_is_fine_and_then_nothing_runs(folder):
    engine = start(folder)
    engine.stop()
    engine.stop()
    with pytest.raises(RunError, match="stopped"):
        engine.generate(REQUESTS, GREEDY)
