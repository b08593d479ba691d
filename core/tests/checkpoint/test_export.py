"""An export answers as the trained model does, or leaves nothing."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from posttune.checkpoint import _export, _verify, store
from posttune.checkpoint._export import export_model
from posttune.checkpoint.sources import LiveModel, ModelSource, open_source
from posttune.config.models import LoraConfig, ModelConfig, PluginRef
from posttune.errors import ExportError, ModelError, UserError
from posttune.models.load import LoadedModel, load_model
from posttune.testing.tiny import tiny_model
from posttune.types import Verification
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

IDS = torch.arange(3, 60)[None]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found.float()


def read(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


def trained(
    folder: Path, *, tie: bool = False, lora: LoraConfig | None = None, dtype: Any = "float32"
) -> LoadedModel:
    base = tiny_model(folder / "base", layers=1, tie=tie)
    loaded = load_model(ModelConfig(path=str(base), lora=lora, dtype=dtype), base, seed=0)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if parameter.requires_grad:
                parameter.add_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.05
                )
    return loaded


def sources(folder: Path, loaded: LoadedModel) -> list[ModelSource]:
    path = store.begin(
        folder / "checkpoints",
        1,
        model=loaded.model,
        optimizer=None,
        state={},
        tokenizer=loaded.tokenizer,
        config={},
        base=loaded.base,
    ).complete()
    return [LiveModel(loaded.model, loaded.tokenizer), open_source(path)]


def test_the_configuration_names_its_architecture(tmp_path: Path) -> None:
    """SGLang starts with no other; that of a model made by ``model.init``, and of a folder, may lack it."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    made = ModelConfig(init={"model_type": "llama", **sizes}, tokenizer="bytes")
    loaded = load_model(made, None, seed=0)
    export_model(LiveModel(loaded.model, loaded.tokenizer), tmp_path / "made")
    config = tmp_path / "made/config.json"
    fields = json.loads(config.read_text("utf-8"))
    assert fields.pop("architectures") == ["LlamaForCausalLM"]
    config.write_text(json.dumps(fields), "utf-8")
    export_model(open_source(tmp_path / "made"), tmp_path / "again")
    again = json.loads((tmp_path / "again/config.json").read_text("utf-8"))
    assert again["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["full", "lora"])
def test_same_answers_from_every_source(tmp_path: Path, tie: bool, lora: LoraConfig | None) -> None:
    loaded = trained(tmp_path, tie=tie, lora=lora)
    expected = logits(loaded.model)
    for number, source in enumerate(sources(tmp_path, loaded)):
        out = tmp_path / f"out{number}"
        exported = export_model(source, out)
        model = read(out)
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
        assert exported.report.dtype == "float32"
        assert exported.report.parameters == sum(p.numel() for p in model.parameters())
        assert exported.verification.max_abs_logit_difference < 1e-5
        assert model.config.tie_word_embeddings is tie
        assert (model.lm_head.weight is model.model.embed_tokens.weight) is tie
        weights = load_file(out / "model.safetensors")
        assert ("lm_head.weight" in weights) is not tie
        assert not any("lora" in name for name in weights)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_types(tmp_path: Path, dtype: str) -> None:
    loaded = trained(tmp_path, lora=LoraConfig(rank=4))
    for number, source in enumerate(sources(tmp_path, loaded)):
        exported = export_model(source, tmp_path / f"out{number}", dtype=dtype)
        assert exported.report.dtype == dtype
        assert 0 < exported.verification.max_abs_logit_difference < exported.verification.tolerance
        weights = load_file(tmp_path / f"out{number}" / "model.safetensors")
        assert {tensor.dtype for tensor in weights.values()} == {getattr(torch, dtype)}
        config = json.loads((tmp_path / f"out{number}" / "config.json").read_text())
        assert config["dtype"] == dtype


def test_adapters_on_bfloat16_keep_their_digits_in_float32(tmp_path: Path) -> None:
    loaded = trained(tmp_path, lora=LoraConfig(rank=4), dtype="bfloat16")
    source = sources(tmp_path, loaded)[1]
    assert export_model(source, tmp_path / "keep").report.dtype == "bfloat16"
    exported = export_model(source, tmp_path / "wide", dtype="float32")
    assert exported.verification.max_abs_logit_difference < 1e-5


def test_everything_comes_along_and_anybody_may_read_it(tmp_path: Path) -> None:
    loaded = trained(tmp_path)
    loaded.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    exported = export_model(LiveModel(loaded.model, loaded.tokenizer), tmp_path / "out")
    assert set(exported.report.files) == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(exported.report.files)
    for path in (tmp_path / "out").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert read(tmp_path / "out").generation_config.eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    again = export_model(open_source(tmp_path / "out"), tmp_path / "again")
    assert again.report.files == exported.report.files
    assert again.verification.max_abs_logit_difference == 0


def test_shards(tmp_path: Path) -> None:
    loaded = trained(tmp_path)
    options = PluginRef(name="hf", options={"shard_gb": 1e-4})
    exported = export_model(LiveModel(loaded.model, loaded.tokenizer), tmp_path / "out", exporter=options)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(files) < set(exported.report.files)
    torch.testing.assert_close(logits(read(tmp_path / "out")), logits(loaded.model), rtol=0, atol=0)


def test_pipeline_answers(tmp_path: Path) -> None:
    from transformers import pipeline

    loaded = trained(tmp_path)
    export_model(LiveModel(loaded.model, loaded.tokenizer), tmp_path / "out")
    answer = pipeline("text-generation", model=str(tmp_path / "out"))("Hello", max_new_tokens=4)
    assert answer[0]["generated_text"].startswith("Hello")


def spoil(folder: Path, how: str) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    if how == "a value":
        weights["lm_head.weight"][200, 3] += 0.01
    elif how == "a weight is gone":
        del weights["model.layers.0.mlp.up_proj.weight"]
    elif how == "one too many":
        weights["extra.weight"] = torch.zeros(2)
    elif how == "one row of the embedding":  # no token of the probe need show it
        weights["model.embed_tokens.weight"][255] = 0
    elif how == "configuration":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    elif how == "tie":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
        del weights["lm_head.weight"]
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "how", ["a value", "a weight is gone", "one too many", "one row of the embedding", "configuration", "tie"]
)
def test_a_difference_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A fault while writing, planted between the writing and the reading back."""
    loaded = trained(tmp_path)
    checked = _verify.verify_model

    def verify(source: ModelSource, folder: Path) -> Verification:
        spoil(folder, how)
        return checked(source, folder)

    monkeypatch.setattr(_verify, "verify_model", verify)
    with pytest.raises((ExportError, ModelError)):
        export_model(LiveModel(loaded.model, loaded.tokenizer), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_model_that_answers_nan_is_not_exported(tmp_path: Path) -> None:
    loaded = trained(tmp_path)
    with torch.no_grad():
        loaded.model.model.norm.weight[0] = float("nan")
    with pytest.raises(ExportError, match="logits differ by nan"):
        export_model(LiveModel(loaded.model, loaded.tokenizer), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_ties_that_contradict_the_configuration_are_refused(tmp_path: Path) -> None:
    loaded = trained(tmp_path, tie=True)
    loaded.model.lm_head.weight = torch.nn.Parameter(loaded.model.lm_head.weight.clone())
    with pytest.raises(ModelError, match="tie_word_embeddings is True, but its embeddings are two"):
        LiveModel(loaded.model, loaded.tokenizer)


def test_equal_but_untied_embeddings_stay_untied(tmp_path: Path) -> None:
    loaded = trained(tmp_path)
    with torch.no_grad():
        loaded.model.lm_head.weight.copy_(loaded.model.model.embed_tokens.weight)
    export_model(LiveModel(loaded.model, loaded.tokenizer), tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert read(tmp_path / "out").config.tie_word_embeddings is False


def test_rows_that_the_configuration_does_not_know(tmp_path: Path) -> None:
    loaded = trained(tmp_path)
    loaded.model.config.vocab_size = 200
    with pytest.raises(
        ExportError, match=r"embed_tokens.weight has 259 rows, the configuration says vocab_size 200"
    ):
        export_model(LiveModel(loaded.model, loaded.tokenizer), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_is_kept(tmp_path: Path) -> None:
    source = open_source(tiny_model(tmp_path / "m", layers=1))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(UserError, match="exists already"):
        export_model(source, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    export_model(source, tmp_path / "out", replace=True)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_unknown_type(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown dtype 'int8'"):
        export_model(open_source(tiny_model(tmp_path / "m", layers=1)), tmp_path / "out", dtype="int8")


def test_a_view_is_written_without_its_neighbours() -> None:
    view = torch.arange(100.0)[10:20]
    assert _export.export_tensor(view, torch.float32).untyped_storage().nbytes() == 40
    assert _export.export_tensor(torch.arange(3), torch.bfloat16).dtype == torch.int64
