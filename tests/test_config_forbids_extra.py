"""Every configuration model forbids unknown keys: a typo is an error, never a silent default."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator

import posttune
import pytest
from posttune.catalog import Catalog
from posttune.config.models import RunConfig, Strict
from posttune.pipeline import models_in, options_model
from pydantic import BaseModel, ConfigDict, ValidationError


def models_of_core() -> set[type[BaseModel]]:
    """All pydantic models that posttune defines, wherever."""
    for module in pkgutil.walk_packages(posttune.__path__, "posttune."):
        if not module.name.endswith("__main__") and ".template" not in module.name:
            importlib.import_module(module.name)
    return {model for model in _subclasses(BaseModel) if model.__module__.split(".")[0] == "posttune"}


def _subclasses(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for child in model.__subclasses__():
        yield child
        yield from _subclasses(child)


def permissive(models: Iterable[type[BaseModel]]) -> list[str]:
    """The models that let unknown keys pass."""
    return sorted(
        f"{model.__module__}.{model.__qualname__}"
        for model in models
        if model.model_config.get("extra") != "forbid"
    )


def test_every_model_of_core_forbids_unknown_keys() -> None:
    models = models_of_core()
    assert RunConfig in models
    assert len(models) > 25
    assert permissive(models) == []


def test_the_options_of_every_installed_plugin_forbid_unknown_keys() -> None:
    entries = [entry for entry in Catalog({}).entries() if entry.status == "ready"]
    assert len(entries) > 25
    found = {entry.id: permissive(models_in(options_model(entry.kind, entry.name))) for entry in entries}
    assert {str(plugin): names for plugin, names in found.items() if names} == {}


def test_the_options_of_every_installed_plugin_refuse_a_typo() -> None:
    for entry in Catalog({}).entries():
        if entry.status == "ready":
            with pytest.raises(ValidationError, match="not permitted"):
                options_model(entry.kind, entry.name).model_validate({"no_such_option": 1})


def test_the_check_itself_sees_a_permissive_model() -> None:
    class Loose(Strict):
        model_config = ConfigDict(extra="ignore")

    class Holder(Strict):
        inner: dict[str, Loose | None]

    assert [name.rpartition(".")[2] for name in permissive(models_in(Holder))] == ["Loose"]
