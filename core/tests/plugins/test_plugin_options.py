"""A plugin's options are validated by its own Config, and a typo never passes."""

from __future__ import annotations

import pytest
from plugin_wheels import Install, Source, plugin
from posttune.config.models import PluginRef
from posttune.errors import ConfigError, PluginContractError, PluginOptionsError
from posttune.pipeline import compose, models_in, options_model, validate_options

TEMPLATE = """
from __future__ import annotations
from typing import Annotated, Literal
from pydantic import BaseModel, ConfigDict, Field, field_validator
from posttune import hookimpl

{models}

class Plugin:
    {config}

    def __init__(self, config{default}):
        self.config = config

    @hookimpl
    def reward_score(self, samples):
        return [0.0 for _ in samples]
"""

STRICT = """
class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    weight: float = 1.0

class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    target: Annotated[int, Field(gt=0)]
    mode: Literal["words", "tokens"] = "words"
    inner: Inner = Inner()
    others: list[Inner] = []

    @field_validator("mode")
    @classmethod
    def refuse(cls, mode):
        if mode == "tokens":
            raise KeyError("no tokenizer")
        return mode
"""


def source(name: str, models: str, config: str, default: str = "") -> Source:
    return plugin(name, "reward", TEMPLATE.format(models=models, config=config, default=default))


def refusal(name: str, **options: object) -> PluginOptionsError:
    with pytest.raises(PluginOptionsError) as caught:
        validate_options("reward", PluginRef(name=name, label="brevity", options=options))
    return caught.value


@pytest.fixture
def strict(install: Install) -> str:
    install(source("strict", STRICT, "Config = Options"))
    return "strict"


def test_good_options_reach_the_plugin(strict: str) -> None:
    (member,) = compose("reward", [PluginRef(name=strict, options={"target": 3, "inner": {"weight": 2}})])
    assert member.config.model_dump() == {
        "target": 3,
        "mode": "words",
        "inner": {"weight": 2.0},
        "others": [],
    }
    (instance,) = member.manager.get_plugins()
    assert instance.config is member.config


def test_all_problems_come_together_with_path_and_nearest_name(strict: str) -> None:
    error = refusal(strict, targt=3, mode="letters", others=[{"weight": 1}, {"wieght": 1}])
    paths = {problem.path: problem for problem in error.problems}
    assert set(paths) == {"options.targt", "options.target", "options.mode", "options.others.1.wieght"}
    assert paths["options.targt"].suggestion == "target"
    assert paths["options.others.1.wieght"].suggestion == "weight"
    message = str(error)
    assert message.startswith("reward 'strict' [brevity] (posttune-strict 1.2.3): ")
    assert "options.targt: unknown option (did you mean 'target'?)" in message
    assert "must be one of words, tokens, not the text 'letters'" in message
    assert "its options are: target, mode, inner, others" in message
    assert "posttune plugins show reward strict" in message


def test_a_value_out_of_range(strict: str) -> None:
    (problem,) = refusal(strict, target=0).problems
    assert str(problem) == "options.target: must be greater than 0, not 0"


def test_a_validator_that_crashes_is_the_plugin_s_refusal(strict: str) -> None:
    assert "its Config raised KeyError: 'no tokenizer'" in str(refusal(strict, target=1, mode="tokens"))


def test_a_plugin_without_config_takes_no_options(install: Install) -> None:
    install(source("plain", "", "", default="=None"))
    assert options_model("reward", "plain").model_fields == {}
    assert "options.anything: unknown option" in str(refusal("plain", anything=1))
    assert compose("reward", [PluginRef(name="plain")])[0].label == "plain"


@pytest.mark.parametrize(
    ("name", "models", "config", "words"),
    [
        ("notpydantic", "", "class Config: pass", "its Config is not a pydantic model"),
        ("aninstance", "", "Config = dict(a=1)", "its Config is not a pydantic model"),
        ("permissive", "class C(BaseModel): a: int = 1", "Config = C", "C accepts unknown options"),
        (
            "permissiveinside",
            "class D(BaseModel): a: int = 1\n"
            "class C(BaseModel):\n"
            '    model_config = ConfigDict(extra="forbid")\n'
            "    parts: dict[str, list[D] | None] = {}\n",
            "Config = C",
            "D accepts unknown options",
        ),
    ],
)
def test_a_config_that_is_not_strict_is_refused(
    install: Install, name: str, models: str, config: str, words: str
) -> None:
    install(source(name, models, config))
    with pytest.raises(PluginContractError) as caught:
        options_model("reward", name)
    message = str(caught.value)
    assert message.startswith(f"reward {name!r} (posttune-{name} 1.2.3): {words}")
    assert 'ConfigDict(extra="forbid")' in message


def test_equal_labels_are_refused(strict: str) -> None:
    ref = PluginRef(name=strict, options={"target": 1})
    with pytest.raises(ConfigError, match="2 plugins of this kind are labelled 'strict'"):
        compose("reward", [ref, ref])
    assert len(compose("reward", [ref, ref.model_copy(update={"label": "second"})])) == 2


def test_models_in_finds_models_that_refer_to_themselves() -> None:
    from pydantic import BaseModel

    class Node(BaseModel):
        children: list[Node] = []

    Node.model_rebuild(_types_namespace={"Node": Node})
    assert list(models_in(Node)) == [Node]
