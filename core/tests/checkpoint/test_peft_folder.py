"""Adapters: the ``lora_adapter`` exporter, and PEFT folders as a source."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from posttune.checkpoint import store
from posttune.checkpoint._export import export_model
from posttune.checkpoint.sources import LiveModel, ModelSource, open_source
from posttune.cli.main import main
from posttune.config.models import LoraConfig, ModelConfig, PluginRef
from posttune.errors import ModelError, UserError
from posttune.models.load import LoadedModel, load_model
from posttune.testing.tiny import tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ADAPTER = PluginRef(name="lora_adapter")
IDS = torch.arange(3, 60)[None]
LORA = LoraConfig(rank=4, alpha=32.0)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found.float()


def base_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "base", layers=1)


@pytest.fixture(scope="module")
def trained(base: Path) -> LoadedModel:
    loaded = load_model(ModelConfig(path=str(base), lora=LORA), base, seed=0)
    shake(loaded.model)
    return loaded


def shake(model: torch.nn.Module) -> None:
    """Adapters that change something: peft begins with zeros."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def checkpoint(folder: Path, loaded: LoadedModel) -> Path:
    return store.begin(
        folder,
        1,
        model=loaded.model,
        optimizer=None,
        state={},
        tokenizer=loaded.tokenizer,
        config={},
        base=loaded.base,
    ).complete()


@pytest.fixture(scope="module")
def adapter(base: Path, trained: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that peft itself has written."""
    folder = tmp_path_factory.mktemp("peft") / "adapter"
    trained.model.save_pretrained(str(folder))
    return folder


def test_peft_loads_what_is_written(base: Path, trained: LoadedModel, tmp_path: Path) -> None:
    live: ModelSource = LiveModel(trained.model, trained.tokenizer, base=trained.base)
    for number, source in enumerate((live, open_source(checkpoint(tmp_path / "run", trained)))):
        out = tmp_path / f"out{number}"
        exported = export_model(source, out, exporter=ADAPTER)
        assert exported.report.dtype == "float32"
        assert exported.report.parameters == sum(
            parameter.numel() for name, parameter in trained.model.named_parameters() if "lora_" in name
        )
        assert set(exported.report.files) >= {
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
            "tokenizer.json",
        }
        assert "config.json" not in exported.report.files
        loaded = peft.PeftModel.from_pretrained(base_model(base), str(out)).eval()
        assert torch.equal(logits(loaded), logits(trained.model))
        config = json.loads((out / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 32.0, "CAUSAL_LM")
        assert config["base_model_name_or_path"] == str(base.resolve())
        again = export_model(open_source(out), tmp_path / f"merged{number}")
        assert again.verification.max_abs_logit_difference < 1e-5
        torch.testing.assert_close(
            logits(base_model(tmp_path / f"merged{number}")), logits(trained.model), rtol=0, atol=1e-5
        )


def test_a_smaller_type(base: Path, trained: LoadedModel, tmp_path: Path) -> None:
    source = LiveModel(trained.model, trained.tokenizer, base=trained.base)
    exported = export_model(source, tmp_path / "out", dtype="bfloat16", exporter=ADAPTER)
    assert exported.report.dtype == "bfloat16"
    assert 0 < exported.verification.max_abs_logit_difference < exported.verification.tolerance
    weights = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_what_has_no_adapters_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no adapters: all of its weights were trained"):
        export_model(open_source(base), tmp_path / "out", exporter=ADAPTER)
    loaded = load_model(ModelConfig(path=str(base), lora=LORA), base, seed=0)
    unknown = LiveModel(loaded.model, loaded.tokenizer)
    with pytest.raises(UserError, match="nothing says which folder"):
        export_model(unknown, tmp_path / "out", exporter=ADAPTER)
    whole = checkpoint(tmp_path / "whole", load_model(ModelConfig(path=str(base)), base, seed=0))
    second = load_model(ModelConfig(path=str(whole), lora=LORA), whole, seed=0)
    with pytest.raises(UserError, match=r"no Hugging Face folder(.|\n)*posttune export"):
        export_model(open_source(checkpoint(tmp_path / "two", second)), tmp_path / "out", exporter=ADAPTER)
    assert not (tmp_path / "out").exists()


def test_a_fault_while_writing_leaves_no_folder(
    base: Path, trained: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttune.checkpoint import _adapter
    from posttune.errors import ExportError

    checked = _adapter.verify_adapter

    def verify(source: ModelSource, folder: Path) -> Any:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 16}))
        return checked(source, folder)

    monkeypatch.setattr(_adapter, "verify_adapter", verify)
    with pytest.raises(ExportError, match="answers differently"):
        export_model(
            LiveModel(trained.model, trained.tokenizer, base=base), tmp_path / "out", exporter=ADAPTER
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("pickled", [False, True])
def test_a_folder_of_peft(adapter: Path, trained: LoadedModel, tmp_path: Path, pickled: bool) -> None:
    folder = copied(adapter, tmp_path / "adapter")
    if pickled:
        torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
        (folder / "adapter_model.safetensors").unlink()
    source = open_source(folder)
    assert source.kind == "peft"
    assert torch.equal(logits(source.load_model()), logits(trained.model))
    exported = export_model(source, tmp_path / "out")
    assert exported.verification.max_abs_logit_difference < 1e-5
    torch.testing.assert_close(logits(base_model(tmp_path / "out")), logits(trained.model), rtol=0, atol=1e-5)
    assert "LoRA of base, merged" in (tmp_path / "out" / "README.md").read_text()


def copied(source: Path, to: Path) -> Path:
    to.mkdir()
    for path in source.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def rewrite(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "gone"}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_alpha": "gone"}, r"no usable 'lora_alpha' \(found None\): the scale is unknown"),
        ({"lora_alpha": 0}, "no usable 'lora_alpha'"),
        ({"r": "gone"}, "no usable 'r'"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"base_model_name_or_path": "someone/model"}, r"belongs to the model 'someone/model'(.|\n)*--base"),
        ({"base_model_name_or_path": None}, "--base"),
        ({"target_modules": ["q_proj"]}, r"holds \d+ weights that belong to no module"),
        ({"r": 8}, "does not fit"),
    ],
)
def test_a_configuration_that_does_not_do(
    adapter: Path, tmp_path: Path, fields: dict[str, Any], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = copied(adapter, tmp_path / "adapter")
    rewrite(folder, **fields)
    with pytest.raises(ModelError, match=message):
        open_source(folder).load_model()
    assert main(["export", str(folder), "--to", str(tmp_path / "out")]) == 2
    assert "next:" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_weights_that_do_not_do(adapter: Path, tmp_path: Path) -> None:
    folder = copied(adapter, tmp_path / "adapter")
    weights = load_file(folder / "adapter_model.safetensors")
    save_file(dict(list(weights.items())[1:]), folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="lacks 1 of the weights"):
        open_source(folder).load_model()
    data = (adapter / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match="cannot be read"):
        open_source(folder).load_model()
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no adapter_model\.safetensors"):
        open_source(folder)


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.marker}",))


def test_a_hostile_adapter_executes_nothing(adapter: Path, tmp_path: Path) -> None:
    folder = copied(adapter, tmp_path / "adapter")
    (folder / "adapter_model.safetensors").unlink()
    torch.save({"payload": Hostile(tmp_path / "marker")}, folder / "adapter_model.bin")
    with pytest.raises(ModelError, match="is refused"):
        open_source(folder).load_model()
    assert not (tmp_path / "marker").exists()


def test_scaled_otherwise_and_trained_whole(base: Path, tmp_path: Path) -> None:
    """What peft alone knows: rank-stabilised scale, ranks by layer, a head that replaces the base's."""
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        use_rslora=True,
        rank_pattern={"q_proj": 2},
        alpha_pattern={"v_proj": 3},
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["lm_head"],
        task_type="CAUSAL_LM",
    )
    model: Any = peft.get_peft_model(base_model(base), settings)
    shake(model)
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(1.5)
    model.save_pretrained(str(tmp_path / "adapter"))
    exported = export_model(open_source(tmp_path / "adapter", base=base), tmp_path / "out")
    assert exported.verification.max_abs_logit_difference < 1e-4
    torch.testing.assert_close(logits(base_model(tmp_path / "out")), logits(model.eval()), rtol=0, atol=1e-4)


def test_an_adapter_of_a_tied_embedding_is_refused(tmp_path: Path) -> None:
    tied = tiny_model(tmp_path / "tied", layers=1, tie=True)
    settings = peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(base_model(tied), settings).save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(ModelError, match="adapts an embedding that is tied"):
        export_model(open_source(tmp_path / "adapter", base=tied), tmp_path / "out")
