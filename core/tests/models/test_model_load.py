"""Loading and making models: what is asked for, and clear refusals of what cannot be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from posttune.config.models import LoraConfig, ModelConfig
from posttune.errors import ModelError
from posttune.models.load import LoadedModel, eos_ids, load_model, load_reference
from posttune.models.lora import is_adapted, is_lora
from posttune.models.params import count_parameters, named_hf_tensors
from posttune.testing.tiny import tiny_model
from safetensors.torch import load_file, save_file

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "base", layers=1)


def load(folder: Path, seed: int = 0, **more: Any) -> LoadedModel:
    return load_model(ModelConfig(path=str(folder), **more), folder, seed=seed)


def made(seed: int = 0, tokenizer: str | None = "bytes", **fields: Any) -> LoadedModel:
    init = {"model_type": "llama", **SIZES, **fields}
    return load_model(ModelConfig(init=init, tokenizer=tokenizer), None, seed=seed)


def weights(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    return dict(loaded.model.named_parameters())


def equal(one: LoadedModel, two: LoadedModel) -> bool:
    left, right = weights(one), weights(two)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_folder(folder: Path) -> None:
    loaded = load(folder)
    assert loaded.source == folder.resolve()
    assert loaded.base is None
    assert not loaded.tied
    assert loaded.model.dtype == torch.float32
    assert not loaded.model.training
    assert loaded.eos_ids == {2}


def test_a_new_model_is_a_function_of_the_seed(folder: Path) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one = made(seed=1)
    assert torch.equal(state, torch.get_rng_state())  # the caller's stream is untouched
    torch.rand(3)
    assert equal(one, made(seed=1))
    assert not equal(one, made(seed=2))
    config = one.model.config
    assert (config.vocab_size, config.bos_token_id, config.eos_token_id, config.pad_token_id) == (
        259,
        1,
        2,
        0,
    )
    assert one.source is None
    assert one.eos_ids == {2}


def test_adapters_are_a_function_of_the_seed(folder: Path) -> None:
    one = load(folder, seed=1, lora=LoraConfig(rank=2))
    torch.rand(3)
    assert equal(one, load(folder, seed=1, lora=LoraConfig(rank=2)))
    assert not equal(one, load(folder, seed=2, lora=LoraConfig(rank=2)))
    assert one.lora
    assert one.base == folder.resolve()
    assert 0 < count_parameters(one.model, trainable=True) < count_parameters(one.model)


def test_there_are_no_adapters_while_a_thread_imports_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward model may be the first to need it, while the policy computes."""
    for name in ("peft", "peft.tuners.lora"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # as it is before its classes are there
    layer = torch.nn.Linear(2, 2)
    assert not is_lora(layer)
    assert not is_adapted(layer)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]])
def test_targets_of_the_adapters(folder: Path, targets: Any) -> None:
    trained = [
        name
        for name, parameter in weights(load(folder, lora=LoraConfig(target_modules=targets))).items()
        if parameter.requires_grad
    ]
    assert len(trained) == 2 * (7 if targets == "all-linear" else 2)
    assert not any("lm_head" in name for name in trained)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_types(folder: Path, dtype: str) -> None:
    loaded = load(folder, dtype=dtype, lora=LoraConfig(rank=2))
    assert loaded.base_dtype == torch.float32
    types = {parameter.dtype for name, parameter in weights(loaded).items() if ".lora_" not in name}
    assert types == {getattr(torch, dtype)}
    assert {p.dtype for p in loaded.model.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize(
    ("attention", "dtype", "expected"),
    [
        ("auto", "float32", "sdpa"),
        ("auto", "bfloat16", "eager"),
        ("sdpa", "bfloat16", "sdpa"),
        ("eager", "float32", "eager"),
    ],
)
def test_attention(folder: Path, attention: Any, dtype: str, expected: str) -> None:
    loaded = load(folder, attention=attention, dtype=dtype)
    assert loaded.model.config._attn_implementation == expected


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "lora"])
def test_recomputed_activations_change_no_gradient(folder: Path, lora: LoraConfig | None) -> None:
    ids = torch.arange(3, 40)[None]
    found = []
    for again in (False, True):
        model = load(folder, lora=lora, gradient_checkpointing=again).model
        model.train()
        model(input_ids=ids, labels=ids).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    plain, recomputed = found
    assert plain.keys() == recomputed.keys()
    assert plain
    for name, gradient in plain.items():
        torch.testing.assert_close(gradient, recomputed[name], rtol=1e-5, atol=1e-7)


def test_reference_stays_while_the_model_learns(folder: Path) -> None:
    for lora in (None, LoraConfig(rank=2)):
        loaded = load(folder, lora=lora)
        reference = load_reference(loaded)
        ids = torch.arange(3, 40)[None]
        before = loaded.model(input_ids=ids).logits.detach()
        loaded.model.train()
        with torch.no_grad():
            for parameter in loaded.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05)
        assert (loaded.model(input_ids=ids).logits - before).abs().max() > 1e-3
        with reference.use() as model:
            logits = model(input_ids=ids).logits
        assert torch.equal(logits, before)
        assert not logits.requires_grad
        assert loaded.model.training
        assert any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_ends_are_a_set(folder: Path) -> None:
    loaded = load(folder)
    assert loaded.model.generation_config is not None
    loaded.model.generation_config.eos_token_id = [7, 9]
    assert eos_ids(loaded.model, loaded.tokenizer) == {2, 7, 9}


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "lora"])
def test_named_tensors_are_those_of_the_file(tmp_path: Path, tie: bool, lora: LoraConfig | None) -> None:
    folder = tiny_model(tmp_path / "m", layers=1, tie=tie)
    loaded = load(folder, lora=lora)
    stored = load_file(folder / "model.safetensors")
    names = [name for name, _ in named_hf_tensors(loaded.model)]
    assert sorted(names) == sorted(stored)
    for name, tensor in named_hf_tensors(loaded.model):  # adapters that have learnt nothing add nothing
        assert torch.equal(tensor, stored[name]), name
        assert not tensor.requires_grad


def refused(match: str, **config: Any) -> None:
    path = config.get("path")
    with pytest.raises(ModelError, match=match):
        load_model(ModelConfig(**config), Path(path) if path else None, seed=0)


def test_places_that_hold_no_model(folder: Path, tmp_path: Path) -> None:
    refused("no such folder", path=str(tmp_path / "nowhere"))
    refused("is a file", path=str(folder / "config.json"))
    refused(r"no config\.json", path=str(tmp_path))
    refused("neither path nor init")


def copy(folder: Path, to: Path, *names: str) -> Path:
    to.mkdir()
    for name in names or [path.name for path in folder.iterdir()]:
        (to / name).write_bytes((folder / name).read_bytes())
    return to


def test_folders_that_lack_something(folder: Path, tmp_path: Path) -> None:
    bare = copy(folder, tmp_path / "1", "config.json")
    refused("no weights in it", path=str(bare), tokenizer="bytes")
    bare = copy(folder, tmp_path / "2", "config.json", "model.safetensors")
    refused("holds no tokenizer", path=str(bare))
    assert load_model(ModelConfig(path=str(bare), tokenizer="bytes"), bare, seed=0).eos_ids == {2}
    (bare / "config.json").write_text("{")
    refused("config.json cannot be used", path=str(bare), tokenizer="bytes")
    bare = copy(folder, tmp_path / "3", "config.json")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (bare / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(
        "2 of its 2 weight files are missing, the first is model-00001", path=str(bare), tokenizer="bytes"
    )


def test_weights_that_are_not_the_configurations(folder: Path, tmp_path: Path) -> None:
    spoilt = copy(folder, tmp_path / "m")
    stored = load_file(spoilt / "model.safetensors")
    gone = stored.pop("model.norm.weight")
    save_file(stored, spoilt / "model.safetensors", metadata={"format": "pt"})
    refused(r"1 weights are missing, the first is model\.norm\.weight", path=str(spoilt))
    save_file(
        stored | {"model.norm.weight": gone[:5].clone()}, spoilt / "model.safetensors", {"format": "pt"}
    )
    refused(r"of another shape|cannot be loaded", path=str(spoilt))
    (spoilt / "model.safetensors").write_bytes(b"\0" * 100)
    refused("model.safetensors is not whole", path=str(spoilt))


def test_ties_that_the_weights_contradict(folder: Path, tmp_path: Path) -> None:
    spoilt = copy(folder, tmp_path / "m")
    config = json.loads((spoilt / "config.json").read_text())
    (spoilt / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    refused("tie_word_embeddings is True, but its embeddings are two", path=str(spoilt))


def test_fields_of_a_new_model() -> None:
    def init(match: str, **fields: Any) -> None:
        refused(match, init={"model_type": "llama", **SIZES, **fields}, tokenizer="bytes")

    init(r"'hiden_size' is no field of a llama configuration\n.*did you mean 'hidden_size'", hiden_size=3)
    init("model_type 'lama' is unknown(.|\n)*did you mean 'llama", model_type="lama")
    init("hidden_size", hidden_size="many")
    init("tokenizer has 259 tokens, the model's vocabulary only 100", vocab_size=100)
    refused("a new model has no tokenizer", init={"model_type": "llama", **SIZES})
    init("reads another tokenizer from a qwen2 folder, Qwen2Tokenizer", model_type="qwen2")
    assert made(rope_theta=5000.0).model.config.rope_parameters["rope_theta"] == 5000.0
    assert made(tie_word_embeddings=True).tied


def test_adapters_that_cannot_be(folder: Path, tmp_path: Path) -> None:
    refused("adapters cannot be placed", path=str(folder), lora=LoraConfig(target_modules=["nothing"]))
    tied = tiny_model(tmp_path / "tied", layers=1, tie=True)
    wrong = LoraConfig(target_modules=["q_proj", "embed_tokens"])
    refused("embed_tokens is tied to another weight", path=str(tied), lora=wrong)


def test_another_seed_makes_another_tiny_model(tmp_path: Path) -> None:
    one, two = tiny_model(tmp_path / "a", layers=1), tiny_model(tmp_path / "b", layers=1, seed=1)
    same = tiny_model(tmp_path / "c", layers=1)
    assert (one / "model.safetensors").read_bytes() == (same / "model.safetensors").read_bytes()
    assert not equal(load(one), load(two))
    larger = tiny_model(tmp_path / "d", tokenizer=one, hidden=32, layers=1, vocab=300)
    assert load(larger).model.config.vocab_size == 300


def test_other_architectures(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "q", layers=1, tie=True, model_type="qwen3")
    loaded = load(folder, lora=LoraConfig(rank=2))
    assert loaded.tied
    assert any(name.endswith("q_norm.weight") for name, _ in named_hf_tensors(loaded.model))
