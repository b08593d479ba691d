"""Reading a configuration: syntax, schema, rules between stages, all problems at once with their lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from posttune.config.load import check_config, dump_yaml, load_config
from posttune.errors import ConfigError, Problem

VALID = """\
output: runs/x
stages:
  convert:
    source: rows.jsonl
  sft:
    model: {init: {model_type: llama}, tokenizer: bytes}
    data: convert
    steps: 3
    optimizer: {lr: 2e-5}
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, "utf-8")
        return path

    return write


def problems(path: Path, *overrides: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


def only(path: Path, *overrides: str) -> Problem:
    (problem,) = problems(path, *overrides)
    return problem


def test_a_valid_file_loads_with_defaults_and_yaml_1_2_numbers(write: Write) -> None:
    config = load_config(write(VALID)).config
    assert config.name == "run"
    assert [ref.name for ref in config.observers] == ["console", "jsonl", "rollouts"]
    sft = config.stages["sft"].model_dump()
    assert sft["kind"] == "sft"
    assert sft["optimizer"]["lr"] == 2e-5
    assert sft["batch_size"] == 32


def test_the_resolved_yaml_loads_to_an_equal_configuration(write: Write) -> None:
    loaded = load_config(write(VALID), ['name="on"', "sft.optimizer.eps=1e-8"])
    again = load_config(write(loaded.to_yaml()))
    assert again.config == loaded.config
    assert again.config.name == "on"


@pytest.mark.parametrize(
    "text", ["1e3", "2e-5", "null", "yes", "0x10", "~", "a: b", "- x", "é\n", "2020-01-01"]
)
def test_any_text_survives_the_resolved_yaml(write: Write, text: str) -> None:
    config = load_config(write(dump_yaml({"output": text, "stages": {"export": {"model": text}}}))).config
    assert config.output == text


def test_every_problem_is_reported_at_once_in_the_order_of_the_file(write: Write) -> None:
    found = problems(
        write(
            """\
output: runs/x
sead: 3
stages:
  convert:
    source: [1]
  sft:
    model: {path: x, dtyp: float32}
    data: 3
    batch_size: "3"
    lr: 1e-3
    optimizer: {lr: -1, schedule: cosin}
    steps: 2.5
"""
        )
    )
    assert [(p.line, p.path) for p in found] == [
        (2, "sead"),
        (5, "stages.convert.source.0"),
        (7, "stages.sft.model.dtyp"),
        (8, "stages.sft.data"),
        (9, "stages.sft.batch_size"),
        (10, "stages.sft.lr"),
        (11, "stages.sft.optimizer.lr"),
        (11, "stages.sft.optimizer.schedule"),
        (12, "stages.sft.steps"),
    ]
    suggestions = {p.path: p.suggestion for p in found if p.suggestion}
    assert suggestions == {
        "sead": "seed",
        "stages.sft.model.dtyp": "dtype",
        "stages.sft.lr": "optimizer.lr",
        "stages.sft.optimizer.schedule": "cosine",
    }
    messages = {p.path: p.message for p in found}
    assert messages["stages.sft.data"] == "must be text or a mapping, not the number 3"
    assert messages["stages.sft.batch_size"] == "must be an integer, not the text '3'"
    assert messages["stages.sft.optimizer.lr"] == "must be at least 0, not -1"
    assert messages["stages.sft.optimizer.schedule"].startswith("must be one of constant, linear, cosine")
    assert all(p.file.endswith("run.yaml") for p in found)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[1]", "must be text or a mapping, not a list"),
        ("", "must be text or a mapping, not empty"),
        ("true", "must be text or a mapping, not true"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_in_plain_words(write: Write, value: str, message: str) -> None:
    problem = only(write(VALID.replace("data: convert", f"data: {value}")))
    assert (problem.path, problem.message) == ("stages.sft.data", message)


def test_a_number_where_text_is_wanted_asks_for_quotes(write: Write) -> None:
    assert "put it in quotes" in only(write(VALID.replace("runs/x", "12"))).message


@pytest.mark.parametrize("value", [".nan", ".inf"])
def test_numbers_are_finite(write: Write, value: str) -> None:
    assert only(write(VALID.replace("2e-5", value))).message.startswith("must be a finite number")


def test_a_missing_key_stands_at_its_mapping(write: Write) -> None:
    problem = only(write(VALID.replace("    data: convert\n", "")))
    assert (problem.line, problem.path, problem.message) == (5, "stages.sft.data", "is required")


def test_the_options_of_a_plugin_beside_its_name_are_explained(write: Write) -> None:
    problem = only(write(VALID + "observers: [{name: jsonl, ever: 3}]\n"))
    assert problem.suggestion == "options.ever"


class TestStages:
    def test_a_name_without_a_kind_needs_one(self, write: Write) -> None:
        problem = only(write(VALID + "  warmup: {model: x}\n"))
        assert (problem.line, problem.path) == (10, "stages.warmup")
        assert "needs a kind" in problem.message

    def test_an_unknown_kind_gets_the_nearest(self, write: Write) -> None:
        problem = only(write(VALID + "  warmup: {kind: evalute}\n"))
        assert (problem.path, problem.suggestion) == ("stages.warmup.kind", "evaluate")

    def test_an_empty_stage_is_no_mapping(self, write: Write) -> None:
        assert only(write(VALID + "  export:\n")).message == "must be a mapping, not empty"

    def test_no_stage_bears_the_name_of_a_top_level_key(self, write: Write) -> None:
        problem = only(write(VALID + "  seed: {kind: export, model: x}\n"))
        assert problem.path == "stages.seed"
        assert "top-level key" in problem.message

    @pytest.mark.parametrize("name", ["a.b", "a/b", "../x", "a b", '""'])
    def test_a_name_can_be_part_of_a_path(self, write: Write, name: str) -> None:
        found = problems(write(VALID + f"  {name}: {{kind: export, model: x}}\n"))
        assert "letters, digits" in found[0].message

    def test_stages_are_required_and_not_empty(self, write: Write) -> None:
        assert only(write("output: x\n")).path == "stages"
        assert only(write("output: x\nstages: {}\n")).message == "needs at least 1 items, not 0"
        assert only(write("output: x\nstages: []\n")).message == "must be a mapping, not a list"


class TestReferences:
    def test_a_later_stage_cannot_be_used(self, write: Write) -> None:
        problem = only(
            write(VALID.replace("data: convert", "data: more") + "  more: {kind: convert, source: x}\n")
        )
        assert (problem.line, problem.path) == (7, "stages.sft.data")
        assert "comes later" in problem.message

    def test_a_stage_cannot_use_itself(self, write: Write) -> None:
        problem = only(write(VALID.replace("{init: {model_type: llama}, tokenizer: bytes}", "sft")))
        assert "itself" in problem.message

    def test_a_stage_of_the_wrong_kind_cannot_be_used(self, write: Write) -> None:
        problem = only(write(VALID + "  export: {model: convert}\n"))
        expected = "expected one of kind sft or rl or export or reward_model"
        assert problem.message == f"stage 'convert' is of kind convert; {expected}"

    def test_a_reference_is_checked_beside_other_mistakes(self, write: Write) -> None:
        text = VALID.replace("data: convert", "data: sft").replace("steps: 3", "stepz: 3")
        assert [p.path for p in problems(write(text))] == ["stages.sft.data", "stages.sft.stepz"]

    def test_references_in_mappings_and_validations_count(self, write: Write) -> None:
        text = VALID + (
            "    evaluate: {every: 1, data: {path: sft}, rewards: [{name: format}]}\n"
            "  evaluate: {model: {path: convert}, data: {path: sft}, rewards: [{name: format}]}\n"
        )
        assert [p.path for p in problems(write(text))] == [
            "stages.sft.evaluate.data.path",
            "stages.evaluate.model.path",
            "stages.evaluate.data.path",
        ]


RL = (
    VALID
    + """\
  rl:
    model: sft
    data: convert
    rewards: [{name: format}]
    steps: 2
"""
)


@pytest.mark.parametrize(
    ("override", "path", "words"),
    [
        ("rl.steps=null", "stages.rl", "either steps or epochs"),
        ("rl.epochs=1", "stages.rl", "either steps or epochs"),
        ("sft.model.path=x", "stages.sft.model", "either path"),
        ("sft.model.tokenizer=null", "stages.sft.model", "needs a tokenizer"),
        ("sft.model.init={hidden_size: 3}", "stages.sft.model.init", "model_type"),
        ("rl.optimizer.betas=[0.9, 1.0]", "stages.rl.optimizer.betas", "[0, 1)"),
        ("rl.rollout.sampling.temperature=0", "stages.rl.rollout.sampling.temperature", "above 0"),
        ("rl.batch.mini_batches=1000", "stages.rl.batch.mini_batches", "more mini-batches"),
        ("rl.kl.target=0.1", "stages.rl.kl.target", "no effect"),
        ("rl.kl={where: loss, estimator: k1}", "stages.rl.kl.estimator", "zero mean"),
        ("rl.rewards=[{name: format}, {name: format}]", "stages.rl.rewards.1", "label"),
        ("observers=[{name: a, label: b}, {name: b}]", "observers.1", "label"),
        ("convert.source=[]", "stages.convert.source", "names no file"),
        (
            "rl.evaluate={every: 1, data: d, rewards: [{name: a}], stop: {metric: accuracy, at_least: 1}}",
            "stages.rl.evaluate.stop.metric",
            "no metric of the validation",
        ),
    ],
)
def test_rules_beyond_types(write: Write, override: str, path: str, words: str) -> None:
    problem = only(write(RL), override)
    assert problem.path == path
    assert words in problem.message


def test_evaluations_are_greedy_unless_they_say_otherwise(write: Write) -> None:
    text = VALID + (
        "    evaluate: {every: 1, data: convert, rewards: [{name: format}], sampling: {max_new_tokens: 4}}\n"
        "  evaluate:\n"
        "    {model: sft, data: convert, rewards: [{name: format}], rollout: {sampling: {n: 2}}}\n"
    )
    stages = load_config(write(text)).plain()["stages"]
    assert stages["sft"]["evaluate"]["sampling"]["temperature"] == 0
    assert stages["evaluate"]["rollout"]["sampling"]["temperature"] == 0
    warm = load_config(write(text), ["evaluate.rollout.sampling.temperature=1"]).plain()["stages"]
    assert warm["evaluate"]["rollout"]["sampling"] == {
        **stages["evaluate"]["rollout"]["sampling"],
        "temperature": 1,
    }


class TestSyntax:
    @pytest.mark.parametrize(
        ("text", "line", "words"),
        [
            ("output: x\noutput: y\n", 2, "twice"),
            ("stages:\n  sft: {data: a,\n        data: b}\n", 3, "twice"),
            ("output:\n\tx: 1\n", 2, "tab"),
            ("", None, "empty"),
            ("# nothing\n", None, "empty"),
            ("- a\n", 1, "must be a mapping"),
            ("just text\n", 1, "must be a mapping"),
            ("output: [1,\n", 2, "the end of the file"),
            ("output: x\n---\noutput: y\n", 2, "second document"),
            ("output: !!python/object:os.system x\n", 1, "tag"),
            ("output: &a [*a]\n", 1, "contains itself"),
            ("output: *nowhere\n", 1, "undefined alias"),
            ("1: x\n", 1, "a key must be text"),
            ("a: \x07\n", 1, "character"),
        ],
    )
    def test_a_mistake_has_its_line(self, write: Write, text: str, line: int | None, words: str) -> None:
        problem = problems(write(text))[0]
        assert problem.line == line
        assert words in problem.message

    def test_a_folder(self, tmp_path: Path) -> None:
        assert "is a folder" in only(tmp_path).message

    def test_a_missing_file(self, tmp_path: Path) -> None:
        problem = only(tmp_path / "no.yaml")
        assert problem.message == "no such file"
        assert problem.file.endswith("no.yaml")

    def test_a_file_that_is_not_utf_8(self, tmp_path: Path) -> None:
        path = tmp_path / "latin.yaml"
        path.write_bytes(b"output: x\nname: \xe9\n")
        assert only(path).line == 2

    def test_a_byte_order_mark_is_no_mistake(self, tmp_path: Path) -> None:
        path = tmp_path / "bom.yaml"
        path.write_text(VALID, "utf-8-sig")
        assert load_config(path).config.output == "runs/x"

    def test_anchors_aliases_and_merge_keys(self, write: Write) -> None:
        text = VALID.replace("{lr: 2e-5}", "&opt {lr: 2e-5, eps: 1e-9}") + (
            "  more: {kind: sft, model: sft, data: convert, steps: 1, optimizer: {<<: *opt, lr: 1}}\n"
        )
        optimizer = load_config(write(text)).config.stages["more"].model_dump()["optimizer"]
        assert (optimizer["lr"], optimizer["eps"]) == (1, 1e-9)


def test_a_mapping_is_taken_as_it_stands_and_not_changed() -> None:
    data = {"output": "x", "stages": {"export": {"model": "m"}}}
    loaded = load_config(data, ["export.dtype=float32"])
    assert loaded.config.stages["export"].model_dump()["dtype"] == "float32"
    assert data == {"output": "x", "stages": {"export": {"model": "m"}}}


class TestPlugins:
    def test_core_and_plugin_problems_come_together(self, write: Write) -> None:
        text = RL.replace(
            "[{name: format}]", "\n      - name: function\n        options:\n          pth: a.py:f\n"
        )
        with pytest.raises(ConfigError) as caught:
            check_config(write(text.replace("steps: 3", "stepz: 3")))
        found = {(p.line, p.path): p for p in caught.value.problems}
        assert found[(16, "stages.rl.rewards.0.options.pth")].suggestion == "path"
        assert any(p.path == "stages.sft.stepz" for p in caught.value.problems)

    def test_an_unknown_plugin_has_its_line_and_the_nearest_name(self, write: Write) -> None:
        with pytest.raises(ConfigError) as caught:
            check_config(write(RL.replace("name: format", "name: fromat")))
        (problem,) = caught.value.problems
        assert (problem.line, problem.path) == (13, "stages.rl.rewards.0.name")
        assert "'format'" in problem.message

    def test_loading_alone_knows_no_plugin(self, write: Write) -> None:
        assert load_config(write(RL.replace("name: format", "name: fromat")))

    def test_a_misspelt_key_of_the_reference_is_told_from_an_option(self, write: Write) -> None:
        with pytest.raises(ConfigError) as caught:
            check_config(
                write(RL.replace("{name: format}", "{name: format, options: {pattern: x}}")),
                ["rl.loss.entropy_coeff=1"],
            )
        (problem,) = caught.value.problems
        assert problem.path == "stages.rl.loss.options.entropy_coeff"
        assert problem.suggestion == "entropy_coef"
        assert problem.file == "override 'rl.loss.entropy_coeff=1'"
