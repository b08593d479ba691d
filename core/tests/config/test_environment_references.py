"""``${env:NAME}``: what is put in, what is refused, and that no secret is written or shown."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from posttune.config.document import Document
from posttune.config.environment import expand, resolve_environment
from posttune.config.load import LoadedConfig, check_config, load_config
from posttune.errors import ConfigError
from posttune.run.resume import stage_settings

SECRET = "hunter2-very-secret"
TEXT = """\
output: ${env:PT_OUT:-runs/here}
seed: ${env:PT_SEED}
stages:
  rl:
    model: ${env:PT_HOME}/models/base
    data: rows
    rewards:
      - name: http
        options:
          url: "http://${env:PT_HOST:-localhost}:${env:PT_PORT:-8000}/"
          headers: {Authorization: "Bearer ${env:PT_TOKEN}"}
    optimizer: {lr: "${env:PT_LR:-1.0e-4}"}
    steps: 3
"""


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in (("PT_SEED", "7"), ("PT_HOME", "/big"), ("PT_TOKEN", SECRET)):
        monkeypatch.setenv(name, value)
    return monkeypatch


def load(folder: Path, text: str = TEXT, *overrides: str) -> LoadedConfig:
    (folder / "run.yaml").write_text(text)
    return load_config(folder / "run.yaml", overrides)


def test_values_take_the_type_that_the_schema_wants(tmp_path: Path, variables: pytest.MonkeyPatch) -> None:
    config = load(tmp_path).config
    stage: Any = config.stages["rl"]
    assert (config.seed, config.output, stage.model) == (7, "runs/here", "/big/models/base")
    assert stage.optimizer.lr == 1e-4
    assert stage.rewards[0].options["headers"] == {"Authorization": f"Bearer {SECRET}"}
    assert stage.rewards[0].options["url"] == "http://localhost:8000/"


def test_nothing_that_is_written_holds_the_secret(tmp_path: Path, variables: pytest.MonkeyPatch) -> None:
    loaded = load(tmp_path)
    for told in (loaded.to_yaml(), str(loaded.plain()), str(stage_settings(loaded.config, "rl"))):
        assert SECRET not in told
        assert "Bearer ${env:PT_TOKEN}" in told
    assert "seed: 7\n" in loaded.to_yaml()  # a number is no secret, and the record must be whole


def test_what_is_written_can_be_loaded_again(tmp_path: Path, variables: pytest.MonkeyPatch) -> None:
    first = load(tmp_path)
    (tmp_path / "resolved.yaml").write_text(first.to_yaml())
    again = load_config(tmp_path / "resolved.yaml")
    assert again.config.model_dump() == first.config.model_dump()
    assert again.to_yaml() == first.to_yaml()


def test_an_override_may_refer_and_may_replace(tmp_path: Path, variables: pytest.MonkeyPatch) -> None:
    variables.setenv("PT_STEPS", "9")
    config = load(tmp_path, TEXT, "rl.steps=${env:PT_STEPS}", "seed=3").config
    assert (config.stages["rl"].steps, config.seed) == (9, 3)  # type: ignore[union-attr]


def test_a_number_that_is_missing_is_one_problem(tmp_path: Path, variables: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, TEXT, "seed=${env:PT_NO_SUCH_SEED}")
    (problem,) = [each for each in caught.value.problems if each.path == "seed"]
    assert "PT_NO_SUCH_SEED is not set" in problem.message


def test_what_is_missing_is_named_with_its_line(tmp_path: Path, variables: pytest.MonkeyPatch) -> None:
    variables.delenv("PT_TOKEN")
    variables.setenv("PT_TOKENS", "x")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    (problem,) = [each for each in caught.value.problems if "PT_TOKEN" in each.message]
    assert (problem.line, problem.path) == (11, "stages.rl.rewards.0.options.headers.Authorization")
    assert "not set" in problem.message
    assert problem.suggestion == "PT_TOKENS"


@pytest.mark.parametrize("value", ["${env:}", "${env:1X}", "${env:X", "a ${env:A-B} b"])
def test_what_is_no_reference_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"no reference: write \$\{env:NAME\}"):
        load(tmp_path, f"output: '{value}'\nstages: {{export: {{model: m}}}}\n")


def test_a_wrong_value_is_not_shown(tmp_path: Path, variables: pytest.MonkeyPatch) -> None:
    variables.setenv("PT_SEED", SECRET)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert SECRET not in str(caught.value)
    assert "seed" in str(caught.value)
    variables.setenv("PT_SEED", "1")
    (tmp_path / "run.yaml").write_text(TEXT.replace("url: ", "timeout: '${env:PT_TOKEN}'\n          url: "))
    with pytest.raises(ConfigError) as refused:
        check_config(tmp_path / "run.yaml")
    assert SECRET not in str(refused.value)


def test_a_choice_is_written_as_it_is(tmp_path: Path, variables: pytest.MonkeyPatch) -> None:
    variables.setenv("PT_DTYPE", "bfloat16")
    text = "output: o\nstages: {export: {model: m, dtype: '${env:PT_DTYPE}'}}\n"
    assert load(tmp_path, text).plain()["stages"]["export"]["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("text", "environ", "expected"),
    [
        ("${env:A}", {"A": "x"}, "x"),
        ("${env:A}-${env:B:-b}", {"A": "x"}, "x-b"),
        ("${env:A:-d}", {"A": ""}, "d"),
        ("${env:A:-}", {}, ""),
        ("${env:A:-http://h:1/}", {}, "http://h:1/"),
        ("$${env:A}", {}, "${env:A}"),
        ("$${env:A} ${env:A}", {"A": "x"}, "${env:A} x"),
        ("${env:A}", {"A": "${env:B}"}, "${env:B}"),
        ("$A ${A} {env:A}", {}, "$A ${A} {env:A}"),
    ],
)
def test_expansion(text: str, environ: dict[str, str], expected: str) -> None:
    assert expand(text, environ) == expected


def test_an_escaped_reference_survives_a_round_trip(tmp_path: Path) -> None:
    first = load(tmp_path, "output: o\nname: '$${env:A}'\nstages: {export: {model: m}}\n")
    assert first.config.name == "${env:A}"
    (tmp_path / "again.yaml").write_text(first.to_yaml())
    assert load_config(tmp_path / "again.yaml").config.name == "${env:A}"


def test_in_options_quotes_decide() -> None:
    data = {
        "stages": {
            "rl": {"kind": "rl", "rewards": [{"name": "x", "options": {"a": "${env:N}", "b": "${env:N}"}}]}
        }
    }
    path = ("stages", "rl", "rewards", 0, "options")
    document = Document(data, quoted={(*path, "b")})
    resolve_environment(document, {"N": "5"})
    assert data["stages"]["rl"]["rewards"][0]["options"] == {"a": 5, "b": "5"}


def test_no_one_writes_the_values_of_a_run_past_this() -> None:
    """Whoever dumps a whole run asks ``told()``; the two places here need the values to check options."""
    source = Path(check_config.__code__.co_filename).parents[1]
    found = []
    for file in source.rglob("*.py"):
        if "template" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "model_dump"
            ):
                holder = ast.unparse(node.func.value)
                if holder.split(".")[-1] in ("run", "config") and file.parent.name in (
                    "run",
                    "trainer",
                    "evaluate",
                ):
                    found.append(f"{file.name}: {holder}")
    assert [each for each in found if "_described" not in each] == []
