"""A path is recognised by what it holds."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from posttune.checkpoint import store
from posttune.checkpoint.sources import LiveModel, open_source
from posttune.config.models import LoraConfig, ModelConfig
from posttune.errors import CheckpointError, ModelError
from posttune.models.load import LoadedModel, load_model
from posttune.testing.tiny import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "base", layers=1)


def trained(folder: Path, lora: LoraConfig | None = None) -> LoadedModel:
    loaded = load_model(ModelConfig(path=str(folder), lora=lora), folder, seed=0)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if parameter.requires_grad:
                parameter.add_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.05
                )
    return loaded


def save(folder: Path, step: int, loaded: LoadedModel) -> Path:
    return store.begin(
        folder,
        step,
        model=loaded.model,
        optimizer=None,
        state={},
        tokenizer=loaded.tokenizer,
        config={},
        base=loaded.base,
    ).complete()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(3, 40)[None]).logits
    return found


def test_hugging_face_folder(folder: Path) -> None:
    source = open_source(folder)
    assert (source.kind, source.path, source.dtype) == ("hf", folder.resolve(), torch.float32)
    assert source.generation_config is not None
    assert source.generation_config.eos_token_id == 2
    assert source.tokenizer.eos_token_id == 2
    assert len(dict(source.tensors())) == 12


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "lora"])
def test_checkpoint_run_and_list_of_checkpoints(
    folder: Path, tmp_path: Path, lora: LoraConfig | None
) -> None:
    loaded = trained(folder, lora)
    save(tmp_path / "checkpoints", 1, trained(folder, lora))
    last = save(tmp_path / "checkpoints", 2, loaded)
    broken = save(tmp_path / "checkpoints", 3, loaded)
    (broken / store.MARKER).unlink()
    for path in (last, tmp_path, tmp_path / "checkpoints"):
        source = open_source(path)
        assert (source.kind, source.path) == ("checkpoint", last.resolve())
        torch.testing.assert_close(logits(source.load_model()), logits(loaded.model), rtol=0, atol=0)
        torch.testing.assert_close(logits(source.load_merged()), logits(loaded.model), rtol=0, atol=1e-5)
    with pytest.raises(CheckpointError, match="never completed"):
        open_source(broken)


def test_adapters_of_a_moved_base(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = tmp_path / "base"
    shutil.copytree(folder, base)
    loaded = trained(base, LoraConfig(rank=2))
    path = save(tmp_path, 1, loaded)
    expected = logits(loaded.model)
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"is gone\n.*--base"):
        open_source(path)
    source = open_source(path, base=tmp_path / "elsewhere")
    torch.testing.assert_close(logits(source.load_merged()), expected, rtol=0, atol=1e-5)
    other = tiny_model(tmp_path / "other", layers=1, seed=9)
    with caplog.at_level(logging.WARNING):
        open_source(path, base=other)
    assert "are not those that" in caplog.text


def test_adapters_on_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    first = save(tmp_path, 1, trained(folder))
    loaded = trained(first, LoraConfig(rank=2))
    second = save(tmp_path, 2, loaded)
    assert loaded.base == first.resolve()
    torch.testing.assert_close(logits(open_source(second).load_model()), logits(loaded.model), rtol=0, atol=0)


@pytest.mark.parametrize("key", ["alpha", "rank", "target_modules"])
def test_adapters_without_their_scale_are_refused(folder: Path, tmp_path: Path, key: str) -> None:
    path = save(tmp_path, 1, trained(folder, LoraConfig(rank=2)))
    meta = json.loads((path / "meta.json").read_text())
    for value in (0, None):
        meta["lora"][key] = value
        text = json.dumps(meta)
        (path / "meta.json").write_text(text)
        marker = json.loads((path / store.MARKER).read_text())
        (path / store.MARKER).write_text(json.dumps(marker | {"meta.json": len(text)}))
        with pytest.raises(CheckpointError, match=f"no usable '{key}'"):
            open_source(path).load_model()


def test_another_type(folder: Path, tmp_path: Path) -> None:
    path = save(tmp_path, 1, trained(folder))
    assert open_source(path).load_model(dtype=torch.bfloat16).dtype == torch.bfloat16
    assert open_source(path).load_model().dtype == torch.float32


def test_the_live_model_is_never_changed(folder: Path) -> None:
    loaded = trained(folder, LoraConfig(rank=2))
    loaded.model.train()
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    source = LiveModel(loaded.model, loaded.tokenizer)
    torch.testing.assert_close(logits(source.load_merged()), logits(loaded.model), rtol=0, atol=1e-5)
    assert len(dict(source.tensors())) == 12
    assert loaded.model.training
    after = loaded.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        open_source(tmp_path / "nowhere")
    (tmp_path / "model.gguf").write_text("GGUF")
    with pytest.raises(ModelError, match="is a file"):
        open_source(tmp_path / "model.gguf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_source(tmp_path / "empty")
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="peft_type None"):
        open_source(tmp_path / "empty")
