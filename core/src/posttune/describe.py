"""One plugin in words: where it comes from, its options and its hooks, as plain data."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from posttune.catalog import Catalog
from posttune.hooks import hooks_of, implemented
from posttune.pipeline import load_plugin, options_model

_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def describe(kind: str, name: str) -> dict[str, Any]:
    """Everything about one plugin. Imports its module; raises a PluginError where it cannot be used."""
    catalog = Catalog()
    entry = catalog.entry(kind, name)
    plugin = load_plugin(kind, name, catalog)
    hooks = [hooks_of(kind)[hook] for hook in implemented(kind, plugin)]
    options = options_model(kind, name, catalog).model_fields
    return {
        "kind": entry.kind,
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "api": entry.api,
        "class": f"{plugin.__module__}:{plugin.__qualname__}",
        "file": inspect.getsourcefile(plugin) or "",
        "summary": (inspect.getdoc(plugin) or "").partition("\n")[0],
        "options": [_option(option, info) for option, info in options.items()],
        "hooks": [
            {"name": hook.name, "signature": hook.signature, "summary": hook.summary} for hook in hooks
        ],
    }


def _option(name: str, info: FieldInfo) -> dict[str, Any]:
    required = info.is_required()
    default = None if required else info.get_default(call_default_factory=True, validated_data={})
    return {
        "name": name,
        "type": type_text(info.annotation) + _limits(info.metadata),
        "required": required,
        "default": to_jsonable_python(default, fallback=repr),
        "description": info.description or "",
    }


def type_text(annotation: Any) -> str:
    """A type as an author would write it, its limits behind it: ``int > 0 | None``."""
    if annotation is None or annotation is type(None):
        return "None"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0]) + _limits(_flat(arguments[1:]))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_text(argument) for argument in arguments)
    if origin is typing.Literal:
        return " | ".join(repr(argument) for argument in arguments)
    name = getattr(origin or annotation, "__name__", str(annotation))
    return f"{name}[{', '.join(type_text(each) for each in arguments)}]" if arguments else name


def _flat(metadata: Iterable[Any]) -> list[Any]:
    return [part for each in metadata for part in (each.metadata if isinstance(each, FieldInfo) else [each])]


def _limits(metadata: Iterable[Any]) -> str:
    found = [
        f"{sign} {getattr(part, key)}"
        for part in metadata
        for key, sign in _SIGNS.items()
        if hasattr(part, key)
    ]
    return " " + ", ".join(found) if found else ""
