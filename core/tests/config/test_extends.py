"""``extends:``: what is merged, what is replaced, and the file and line of every fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from posttune.config.load import check_config, load_config
from posttune.errors import ConfigError, Problem

BASE = """\
output: runs/base
seed: 1
stages:
  rl:
    model: models/base
    data: rows
    rewards: [{name: gsm8k}, {name: gsm8k, label: again}]
    advantage: {name: grpo, options: {ddof: 0}}
    loss: {name: ppo_clip, aggregation: token_mean, options: {clip_ratio: 0.2}}
    optimizer: {lr: 1.0e-5, warmup_steps: 3}
    steps: 10
  export: {model: rl}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    return tmp_path


def loaded(folder: Path, text: str, *overrides: str) -> dict[str, Any]:
    (folder / "run.yaml").write_text(text)
    return load_config(folder / "run.yaml", overrides).plain()


def problems(folder: Path, text: str) -> list[Problem]:
    (folder / "run.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        check_config(folder / "run.yaml")
    return caught.value.problems


def test_mappings_are_merged_and_all_else_is_replaced(folder: Path) -> None:
    text = "extends: base.yaml\noutput: runs/mine\nstages:\n  rl:\n    rewards: [{name: format}]\n"
    found = loaded(folder, text + "    optimizer: {lr: 1.0e-4}\n  second: {kind: export, model: rl}\n")
    assert (found["output"], found["seed"]) == ("runs/mine", 1)
    assert list(found["stages"]) == ["rl", "export", "second"]
    stage = found["stages"]["rl"]
    assert [reward["name"] for reward in stage["rewards"]] == ["format"]
    assert (stage["optimizer"]["lr"], stage["optimizer"]["warmup_steps"]) == (1e-4, 3)


def test_another_plugin_begins_with_options_of_its_own(folder: Path) -> None:
    text = "extends: base.yaml\nstages: {rl: {advantage: {name: rloo}, loss: {options: {dual_clip: 3.0}}}}\n"
    stage = loaded(folder, text)["stages"]["rl"]
    assert stage["advantage"]["options"] == {}
    assert stage["loss"]["options"] == {"clip_ratio": 0.2, "dual_clip": 3.0}
    renamed = "extends: base.yaml\nstages: {rl: {loss: {name: gspo}}}\n"
    loss = loaded(folder, renamed)["stages"]["rl"]["loss"]
    assert (loss["options"], loss["aggregation"]) == ({}, "token_mean")


def test_a_stage_is_left_out_or_becomes_another(folder: Path) -> None:
    assert list(loaded(folder, "extends: base.yaml\nstages: {export: null}\n")["stages"]) == ["rl"]
    text = "extends: base.yaml\nstages: {rl: {kind: sft, model: m, data: d, steps: 1}}\n"
    assert loaded(folder, text)["stages"]["rl"]["kind"] == "sft"


def test_the_short_form_of_a_model_is_merged_with_a_long_one(folder: Path) -> None:
    text = "extends: base.yaml\nstages: {rl: {model: {dtype: bfloat16}, data: {limit: 5}}}\n"
    stage = loaded(folder, text)["stages"]["rl"]
    assert (stage["model"]["path"], stage["model"]["dtype"]) == ("models/base", "bfloat16")
    assert (stage["data"]["path"], stage["data"]["limit"]) == ("rows", 5)


def test_several_files_and_a_chain(folder: Path) -> None:
    (folder / "more").mkdir()
    (folder / "more/seed.yaml").write_text("seed: 7\nthreads: 2\n")
    (folder / "more/middle.yaml").write_text("extends: ../base.yaml\nthreads: 3\n")
    text = "extends: [more/middle.yaml, more/seed.yaml]\nname: mine\n"
    found = loaded(folder, text, "rl.steps=4")
    assert (found["seed"], found["threads"], found["name"]) == (7, 2, "mine")
    assert found["stages"]["rl"]["steps"] == 4


def test_what_is_resolved_says_everything_itself(folder: Path) -> None:
    (folder / "run.yaml").write_text("extends: base.yaml\nseed: 5\n")
    first = load_config(folder / "run.yaml")
    (folder / "resolved.yaml").write_text(first.to_yaml())
    assert load_config(folder / "resolved.yaml").config == first.config
    assert "extends" not in first.to_yaml()


def test_a_fault_bears_the_file_and_line_where_it_was_written(folder: Path) -> None:
    (folder / "base.yaml").write_text(BASE.replace("warmup_steps: 3", "warmup_steps: -3"))
    text = "extends: base.yaml\nstages:\n  rl:\n    stepz: 3\n    optimizer: {lr: fast}\n"
    found = {(Path(each.file).name, each.line, each.path) for each in problems(folder, text)}
    assert found == {
        ("base.yaml", 10, "stages.rl.optimizer.warmup_steps"),
        ("run.yaml", 4, "stages.rl.stepz"),
        ("run.yaml", 5, "stages.rl.optimizer.lr"),
    }


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("seed: 1\nextends: gone.yaml\n", 2, "gone.yaml: no such file"),
        ("extends: [base.yaml,\n  gone.yaml]\n", 2, "gone.yaml: no such file"),
        ("extends: run.yaml\n", 1, "the files extend each other: run.yaml -> run.yaml"),
        ("extends: other.yaml\n", 1, "extend each other: run.yaml -> other.yaml -> run.yaml"),
        ("extends: 3\n", 1, "must be the path of a configuration"),
        ("extends: []\n", 1, "must be the path of a configuration"),
        ("extends: '${env:NO_SUCH_VARIABLE}'\n", 1, "NO_SUCH_VARIABLE is not set"),
        ("extends: .\n", 1, "is a folder"),
        ("extends: broken.yaml\n", 2, "a tab; indent with spaces"),
        ("extend: base.yaml\noutput: o\nstages: {export: {model: m}}\n", 1, "unknown key"),
    ],
)
def test_a_file_that_cannot_be_extended(folder: Path, text: str, line: int, words: str) -> None:
    (folder / "other.yaml").write_text("extends: run.yaml\n")
    (folder / "broken.yaml").write_text("stages:\n\tsft: 1\n")
    (found,) = problems(folder, text)
    assert words in found.message
    assert found.line == line
    if "unknown" in words:
        assert found.suggestion == "extends"
    if "tab" in words:
        assert Path(found.file).name == "broken.yaml"


def test_the_schema_lets_a_file_extend() -> None:
    from posttune.config.schema import json_schema

    document = json_schema().document
    assert "extends" in document["properties"]
    assert {"required": ["extends"]} in document["anyOf"]
    assert "required" not in document
