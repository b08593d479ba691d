"""The model card carries the run's figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from posttune.checkpoint import card, store
from posttune.checkpoint.parts import Part
from posttune.cli.main import main
from posttune.config.models import LoraConfig, ModelConfig
from posttune.models.hf_model import HFModel
from posttune.models.load import load_model
from posttune.models.load_scalar import load_critic
from posttune.testing.tiny import tiny_model
from transformers import AutoModelForSequenceClassification

RESOLVED = """
stages:
  rl:
    kind: rl
    model: {path: models/base}
    advantage: {name: gae}
    optimizer: {lr: 1.0e-5}
    steps: 9
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with a checkpoint of a policy and its critic at step 4 of 9."""
    run = tmp_path / "gsm8k"
    base = tiny_model(tmp_path / "base", layers=1)
    actor = load_model(ModelConfig(path=str(base)), base, seed=0)
    critic = load_critic(ModelConfig(path=str(base)), base, seed=0)
    critic.model.get_parameter("score.weight").data.normal_(0, 0.1)
    lines = [
        {"stage": "sft", "step": 2, "global_step": 2, "loss": 9.0},
        {"stage": "rl", "step": 3, "global_step": 5, "reward/mean": 0.25, "val/accuracy": 0.5},
        {"stage": "rl", "step": 4, "global_step": 6, "reward/mean": 0.75, "kl": 0.0123456},
        {"stage": "rl", "step": 5, "global_step": 7, "reward/mean": 0.99},
    ]
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"cut')
    (run / "resolved.yaml").write_text(RESOLVED)
    store.begin(
        run / "checkpoints",
        6,
        model=actor.model,
        optimizer=None,
        state={"stage": "rl", "global_step": 6},
        tokenizer=actor.tokenizer,
        config={},
        parts={"critic": Part(critic.model)},
    ).complete()
    return run


def test_of_a_checkpoint(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert "| mean reward | 0.75 |" in text  # of step 6, not of what came later
    assert "| accuracy of the validation | 0.5 |" in text
    assert "| KL to the reference | 0.01235 |" in text
    assert "| step | 4 of stage rl |" in text
    assert "| loss | 9 |" not in text
    assert "| base model | models/base |" in text
    assert "| advantages | gae |" in text
    assert "cut" not in text


def test_of_a_folder_that_a_stage_left(run: Path) -> None:
    place = card.model_place(run / "models" / "rl")
    assert place == card.RunPlace(run, "rl")
    assert card.figures(place)["mean reward"] == "0.99"
    assert card.model_place(run.parent / "base") is None
    assert card.checkpoint_place(run) is None


def test_a_run_without_figures_has_no_tables(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "resolved.yaml").write_text("stages: [")
    place = card.RunPlace(run, "rl")
    assert card.figures(place) == {}
    assert card.settings(place) == {}


def test_the_critic(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "critic"
    assert main(["export", str(run), "--to", str(out), "--part", "critic"]) == 0
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert model.config.num_labels == 1
    assert model.score.weight.abs().sum() > 0
    assert (out / "tokenizer.json").is_file()
    text = (out / "README.md").read_text()
    assert "a llama critic of" in text
    assert "is_critic=True" in text
    again = HFModel(out, is_critic=True).load()
    assert again.model.get_parameter("score.weight").equal(model.score.weight)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--part", "judge"], "holds no model called 'judge' beside the main one; it holds critic"),
        (["--base", "{base}"], "holds all weights: it needs no base"),
        (["--part", "critic", "--exporter", "lora_adapter"], "has no adapters"),
    ],
)
def test_parts_that_are_not_there(
    run: Path, tmp_path: Path, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [argument.format(base=tmp_path / "base") for argument in arguments]
    assert main(["export", str(run), "--to", str(tmp_path / "out"), *words]) == 2
    assert message in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["export", str(tmp_path / "base"), "--to", str(tmp_path / "out"), "--part", "critic"]) == 2
    assert "has no part 'critic'" in capfd.readouterr().err


def test_a_critic_of_adapters(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", layers=1)
    lora = ModelConfig(path=str(base), lora=LoraConfig(rank=2))
    actor, critic = load_model(lora, base, seed=0), load_critic(lora, base, seed=0)
    path = store.begin(
        tmp_path / "run",
        1,
        model=actor.model,
        optimizer=None,
        state={},
        tokenizer=actor.tokenizer,
        config={},
        base=base,
        parts={"critic": Part(critic.model, None, base)},
    ).complete()
    assert main(["export", str(path), "--to", str(tmp_path / "out"), "--part", "critic"]) == 0
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config.num_labels == 1
