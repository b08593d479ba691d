"""One JSON Schema of the configuration, every installed plugin's options in it, for editors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from posttune.catalog import Catalog
from posttune.config.models import STAGES, RunConfig
from posttune.config.places import PLUGIN_FIELDS, list_item, models_of
from posttune.errors import PluginError
from posttune.pipeline import models_in, options_model

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_REF = "#/$defs/"


@dataclass
class JoinedSchema:
    """The schema, and the plugins that had to be left out of it, with the reason."""

    document: dict[str, Any]
    left_out: dict[str, str] = field(default_factory=dict)


def json_schema() -> JoinedSchema:
    """The schema of a run. Loads every installed plugin; one that fails only lacks its options."""
    document = RunConfig.model_json_schema()
    joined = JoinedSchema({"$schema": DIALECT, **document})
    definitions = document["$defs"]
    catalog = Catalog()
    for model in list(models_in(RunConfig)):
        for name, info in model.model_fields.items():
            kind = PLUGIN_FIELDS.get((model.__name__, name))
            if kind:
                base = models_of(info.annotation) or models_of(list_item(info.annotation))
                key = _define(joined, definitions, kind, base[0], catalog)
                _point(_properties(document, model)[name], base[0].__name__, key)
    _name_stages(document)
    _let_extend(joined.document)
    return joined


def _properties(document: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    home = document if model is RunConfig else document["$defs"][model.__name__]
    properties: dict[str, Any] = home["properties"]
    return properties


def _define(
    joined: JoinedSchema, definitions: dict[str, Any], kind: str, base: type[BaseModel], catalog: Catalog
) -> str:
    """Add the reference to a plugin of a kind: one alternative per installed plugin."""
    key = f"{kind}.{base.__name__}"
    if key in definitions:
        return key
    names = dict.fromkeys(entry.name for entry in catalog.entries(kind))
    common = (definitions.get(base.__name__) or base.model_json_schema())["properties"]
    default = base.model_fields["name"].get_default()
    each = [
        _alternative(kind, name, common, default, _options(joined, definitions, kind, name, catalog))
        for name in names
    ]
    definitions[key] = {"anyOf": each}
    return key


def _alternative(
    kind: str,
    name: str,
    common: Mapping[str, Any],
    default: object,
    options: dict[str, Any] | None,
) -> dict[str, Any]:
    properties = {**common, "name": {"const": name}}
    if options is not None:
        properties["options"] = options
    needed = [] if name == default else ["name"]
    if options is not None and options.get("required"):
        needed.append("options")
    return {
        "title": f"{kind} {name}",
        "type": "object",
        "properties": properties,
        "required": needed,
        "additionalProperties": False,
    }


def _options(
    joined: JoinedSchema, definitions: dict[str, Any], kind: str, name: str, catalog: Catalog
) -> dict[str, Any] | None:
    try:
        model = options_model(kind, name, catalog)
        schema = model.model_json_schema(ref_template=f"{_REF}{kind}.{name}.{{model}}")
    except PluginError as error:
        joined.left_out[f"{kind} {name}"] = error.what
        return None
    for inner, definition in schema.pop("$defs", {}).items():
        definitions[f"{kind}.{name}.{inner}"] = definition
    return schema


def _point(schema: dict[str, Any], old: str, new: str) -> None:
    """Let a property refer to the joined definition where it referred to the plain one."""
    for holder in _holders(schema):
        if holder.get("$ref") == _REF + old:
            holder["$ref"] = _REF + new


def _holders(schema: dict[str, Any]) -> Iterable[dict[str, Any]]:
    yield schema
    for value in schema.values():
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                yield from _holders(inner)


def _name_stages(document: dict[str, Any]) -> None:
    """A stage whose name is a kind needs no kind; any other must give it."""
    models = {kind: {"$ref": _REF + model.__name__} for kind, model in STAGES.items()}
    explicit = {"required": ["kind"], "oneOf": list(models.values())}
    stages = document["properties"]["stages"]
    stages["properties"] = {
        kind: {"if": {"required": ["kind"]}, "then": {"oneOf": list(models.values())}, "else": model}
        for kind, model in models.items()
    }
    stages["additionalProperties"] = explicit


def _let_extend(document: dict[str, Any]) -> None:
    """A file that extends another one need not say everything."""
    path = {"type": "string", "description": "A configuration that this one changes, relative to this file."}
    document["properties"]["extends"] = {"anyOf": [path, {"type": "array", "items": path, "minItems": 1}]}
    document["anyOf"] = [{"required": document.pop("required")}, {"required": ["extends"]}]
