"""The joined JSON Schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from posttune import metadata
from posttune.catalog import Catalog
from posttune.config.load import check_config
from posttune.config.places import PLUGIN_FIELDS
from posttune.config.schema import json_schema
from posttune.pipeline import options_model

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    joined = json_schema()
    assert joined.left_out == {}
    return joined.document


@pytest.mark.parametrize("work", [json_schema, lambda: check_config(QUICKSTART)], ids=["schema", "check"])
def test_what_is_installed_is_listed_once(work: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing reads the metadata of every distribution: one for each plugin took seconds."""
    listings = []
    plain = metadata.entry_points
    monkeypatch.setattr(metadata, "entry_points", lambda *groups: listings.append(groups) or plain(*groups))
    work()
    assert len(listings) == 1


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def test_every_reference_inside_leads_somewhere(schema: dict[str, Any]) -> None:
    names = {reference.removeprefix("#/$defs/") for reference in references(schema)}
    assert names <= set(schema["$defs"])


@pytest.mark.parametrize("kind", sorted(set(PLUGIN_FIELDS.values())))
def test_every_installed_plugin_is_an_alternative_with_its_options(schema: dict[str, Any], kind: str) -> None:
    alternatives = [
        alternative["properties"]
        for name, definition in schema["$defs"].items()
        if name.startswith(f"{kind}.") and "anyOf" in definition
        for alternative in definition["anyOf"]
    ]
    found = {properties["name"]["const"]: properties["options"] for properties in alternatives}
    assert set(found) == {entry.name for entry in Catalog().entries(kind)}
    for name, options in found.items():
        assert set(options.get("properties", {})) == set(options_model(kind, name).model_fields)
        assert options["additionalProperties"] is False


def test_a_plugin_with_a_default_needs_no_name(schema: dict[str, Any]) -> None:
    losses = schema["$defs"]["policy_loss.LossConfig"]["anyOf"]
    optional = [each["properties"]["name"]["const"] for each in losses if "name" not in each["required"]]
    assert optional == ["ppo_clip"]


def test_own_fields_stay_beside_the_options(schema: dict[str, Any]) -> None:
    losses = schema["$defs"]["policy_loss.LossConfig"]["anyOf"]
    assert {"aggregation", "entropy_coef", "label"} <= set(losses[0]["properties"])


def test_stages_named_like_a_kind_need_none(schema: dict[str, Any]) -> None:
    stages = schema["properties"]["stages"]
    assert stages["properties"]["sft"]["else"] == {"$ref": "#/$defs/SftStage"}
    assert stages["additionalProperties"]["required"] == ["kind"]
