"""Every configuration model is strict, and every reference to a plugin has a kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from posttune.catalog import Catalog
from posttune.config.models import STAGES, PluginRef, RunConfig, Strict
from posttune.config.places import PLUGIN_FIELDS, list_item, models_of, named_plugins
from posttune.kinds import KINDS
from posttune.pipeline import models_in, options_model
from pydantic import BaseModel, ValidationError


def all_models() -> list[type[BaseModel]]:
    return list(models_in(RunConfig))


def subclasses(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for each in model.__subclasses__():
        yield each
        yield from subclasses(each)


@pytest.mark.parametrize("model", all_models(), ids=lambda model: model.__name__)
def test_every_model_forbids_unknown_keys(model: type[BaseModel]) -> None:
    assert model.model_config.get("extra") == "forbid"
    with pytest.raises(ValidationError) as caught:
        model.model_validate({"no_such_key": 1})
    assert "extra_forbidden" in {error["type"] for error in caught.value.errors()}


def test_the_walk_reaches_every_model_of_the_schema() -> None:
    reached = set(all_models())
    assert set(STAGES.values()) <= reached
    declared = {model for model in subclasses(Strict) if model.__module__ == "posttune.config.models"}
    assert declared - reached == {STAGES["sft"].__bases__[0]}  # Stage, the base of the stages


@pytest.mark.parametrize("entry", Catalog().entries(), ids=lambda entry: f"{entry.kind}-{entry.name}")
def test_every_installed_plugin_forbids_unknown_options(entry: object) -> None:
    kind, name = entry.kind, entry.name  # type: ignore[attr-defined]
    for model in models_in(options_model(kind, name)):
        assert model.model_config.get("extra") == "forbid"


def test_every_field_that_names_a_plugin_has_a_kind() -> None:
    fields = {
        (model.__name__, name)
        for model in all_models()
        for name, info in model.model_fields.items()
        if any(
            issubclass(inner, PluginRef)
            for inner in (*models_of(info.annotation), *models_of(list_item(info.annotation)))
        )
    }
    assert fields == set(PLUGIN_FIELDS)
    assert set(PLUGIN_FIELDS.values()) <= set(KINDS)


def test_plugins_are_found_wherever_a_configuration_names_them() -> None:
    ref = {"name": "x"}
    training = {"model": "m", "data": "d", "steps": 1}
    validation = {"every": 1, "data": "d", "rewards": [ref]}
    data = {
        "output": "o",
        "observers": [ref],
        "stages": {
            "convert": {"kind": "convert", "source": "s", "converter": ref},
            "sft": {"kind": "sft", **training, "evaluate": validation},
            "rl": {
                "kind": "rl",
                **training,
                "evaluate": validation,
                "rollout": ref,
                "rewards": [ref, {"name": "y"}],
                "reward_manager": ref,
                "advantage": ref,
                "loss": ref,
            },
            "evaluate": {"kind": "evaluate", "model": "m", "data": "d", "rewards": [ref], "rollout": ref},
            "export": {"kind": "export", "model": "m", "exporter": ref},
        },
    }
    found = list(named_plugins(RunConfig.model_validate(data).model_dump()))
    assert {named.kind for named in found} == set(KINDS)
    assert len(found) == 13
    assert ("stages", "rl", "rewards", 1) in [named.path for named in found]
