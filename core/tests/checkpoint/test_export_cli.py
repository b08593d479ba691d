"""``posttune export``, ``posttune generate`` and the export stage."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from posttune.checkpoint import _export, store
from posttune.checkpoint.sources import ModelSource
from posttune.checkpoint.stage import run_export
from posttune.cli.main import main
from posttune.config.models import ExportStage, LoraConfig, ModelConfig
from posttune.models.load import load_model
from posttune.run.folder import RunFolder
from posttune.testing.tiny import tiny_model
from posttune.types import ExportReport
from safetensors.torch import load_file, save_file


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with a checkpoint of adapters."""
    base = tiny_model(tmp_path / "base", layers=1)
    loaded = load_model(ModelConfig(path=str(base), lora=LoraConfig(rank=2)), base, seed=0)
    checkpoints = tmp_path / "run" / "checkpoints"
    store.begin(
        checkpoints,
        7,
        model=loaded.model,
        optimizer=None,
        state={},
        tokenizer=loaded.tokenizer,
        config={},
        base=base,
    ).complete()
    return tmp_path / "run"


def test_export_json(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "out"
    assert main(["export", str(run), "--to", str(to), "--dtype", "bfloat16", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert set(document) == {"files", "parameters", "dtype", "max_abs_logit_difference"}
    assert document["dtype"] == "bfloat16"
    assert all((to / name).is_file() for name in document["files"])
    assert "step 7 of LoRA of base, merged" in (to / "README.md").read_text()
    assert (to / "README.md").read_text().splitlines()[5] == "# run"


def test_export_in_words(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run / "checkpoints" / "global_step_7"), "--to", str(tmp_path / "out")]) == 0
    said = capfd.readouterr()
    assert "74,304 parameters in float32, read back; logits differ by at most 0" in said.out
    assert said.err == ""


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["{tmp}/nowhere", "--to", "{tmp}/out"], 2, "no such folder"),
        (["{tmp}/run", "--to", "{tmp}/base"], 2, "exists already"),
        (["{tmp}/run", "--to", "{tmp}/out", "--dtype", "int8"], 2, "unknown dtype 'int8'"),
        (["{tmp}/run", "--to", "{tmp}/out", "--exporter", "hff"], 2, "'hff'"),
        (["{tmp}/run", "--to", "{tmp}/out", "--base", "{tmp}/nowhere"], 2, "no such folder"),
        (["{tmp}/broken", "--to", "{tmp}/out"], 1, "never completed"),
    ],
)
def test_what_is_refused(
    run: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    tmp = run.parent
    broken = tmp / "broken"
    broken.mkdir()
    (broken / "meta.json").write_text("{}")
    (broken / "tensors").mkdir()
    assert main(["export", *(argument.format(tmp=tmp) for argument in arguments)]) == code
    assert message in capfd.readouterr().err
    assert not (tmp / "out").exists()


class Hostile:
    """Its unpickling makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.marker}",))


def spoil(tmp: Path, how: str) -> Path:
    """A source with a fault."""
    if how == "checkpoint":
        shard = next((tmp / "run").rglob("*.distcp"))
        shard.write_bytes(shard.read_bytes()[:-100])
        return tmp / "run" / "checkpoints" / "global_step_7"
    weights = tmp / "base" / "model.safetensors"
    if how == "pickle":
        weights.unlink()
        torch.save(Hostile(tmp / "marker"), tmp / "base" / "pytorch_model.bin")
    elif how == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        config = tmp / "base" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    return tmp / "base"


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("checkpoint", 1, "is not whole: tensors/__0_0.distcp has"),
        ("cut", 2, "model.safetensors is not whole"),
        ("tied", 2, "tie_word_embeddings"),
        ("pickle", 2, "cannot be loaded: Weights only load failed"),
    ],
)
def test_a_source_with_a_fault(
    run: Path, capfd: pytest.CaptureFixture[str], how: str, code: int, message: str
) -> None:
    tmp = run.parent
    assert main(["export", str(spoil(tmp, how)), "--to", str(tmp / "out")]) == code
    said = capfd.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert not (tmp / "out").exists()
    assert not (tmp / "marker").exists()


def test_a_mismatch_is_exit_code_1_and_leaves_no_folder(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = _export.write_model

    def write_another(source: ModelSource, folder: Path, dtype: str = "keep", **more: Any) -> ExportReport:
        report = written(source, folder, dtype, **more)
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"] += 1e-3
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return report

    monkeypatch.setattr(_export, "write_model", write_another)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 1
    assert "model.norm.weight holds other values" in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_generate(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prompts = [
        "--prompt",
        "12+34=",
        "--prompt",
        "x",
        "--n",
        "2",
        "--temperature",
        "1",
        "--max-new-tokens",
        "3",
    ]
    assert main(["generate", str(run), *prompts, "--json"]) == 0
    first = json.loads(capfd.readouterr().out)
    assert [(each["prompt"], each["index"]) for each in first] == [
        ("12+34=", 0),
        ("12+34=", 1),
        ("x", 0),
        ("x", 1),
    ]
    assert all(1 <= each["tokens"] <= 3 and each["logprob"] < 0 for each in first)
    assert main(["generate", str(run), *prompts, "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == first  # seeded
    assert main(["generate", str(run), "--prompt", "hello", "--max-new-tokens", "2"]) == 0
    assert "cut short" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/nowhere", "--prompt", "x"], "no such folder"),
        (["{tmp}/base", "--prompt", ""], "a prompt is empty"),
        (["{tmp}/base", "--prompt", "x", "--max-new-tokens", "5000"], "the model takes 2048"),
        (["{tmp}/base"], "Missing option '--prompt'"),
        (["{tmp}/base", "--prompt", "x", "--backend", "nothing"], "'nothing'"),
    ],
)
def test_what_generate_refuses(
    run: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["generate", *(argument.format(tmp=run.parent) for argument in arguments)]) == 2
    assert message in capfd.readouterr().err


def test_the_stage(run: Path, tmp_path: Path) -> None:
    outputs = {"rl": run}
    context = SimpleNamespace(folder=RunFolder(run), resolve=lambda name: outputs.get(name, Path(name)))
    for _ in range(2):  # an interrupted run exports again
        result = run_export(ExportStage(model="rl"), cast(Any, context))
    assert result.output == run / "export"
    assert result.metrics["dtype"] == "float32"
    assert result.metrics["parameters"] == 74304
    elsewhere = run_export(
        ExportStage(model="rl", to=str(tmp_path / "there"), dtype="float16"), cast(Any, context)
    )
    assert elsewhere.output == tmp_path / "there"
    assert (tmp_path / "there" / "model.safetensors").is_file()
