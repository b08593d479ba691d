"""``posttune export``, ``posttune generate`` and the export stage."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from posttune.checkpoint import store
from posttune.checkpoint.stage import run_export
from posttune.cli.main import main
from posttune.config.models import ExportStage, LoraConfig, ModelConfig
from posttune.models.load import load_model
from posttune.run.folder import RunFolder
from posttune.testing.tiny import tiny_model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with a checkpoint of adapters."""
    base = tiny_model(tmp_path / "base", layers=1)
    loaded = load_model(ModelConfig(path=str(base), lora=LoraConfig(rank=2)), base, seed=0)
    checkpoints = tmp_path / "run" / "checkpoints"
    store.save(
        checkpoints,
        7,
        model=loaded.model,
        optimizer=None,
        state={},
        tokenizer=loaded.tokenizer,
        config={},
        base=base,
    )
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
