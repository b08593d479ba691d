"""``a.b.c=value`` on the command line.

The first part is a top-level key, or else a stage. A list takes a number, or the label of a plugin.
Inside a plugin reference, a key that is not one of its own goes to its options. The value is YAML.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttune.config.document import Document, Keys, Place, dotted, parse_value
from posttune.config.models import DataConfig, ModelConfig, PluginRef, RunConfig
from posttune.config.places import annotation_at, list_item, model_at, models_of
from posttune.errors import ConfigError, Problem
from posttune.nearest import nearest


class _OverrideError(Exception):
    """An override that leads nowhere."""

    def __init__(self, path: Keys, message: str, suggestion: str = "") -> None:
        self.path, self.message, self.suggestion = path, message, suggestion
        super().__init__(message)


def apply_overrides(document: Document, overrides: Sequence[str]) -> list[Problem]:
    """Change the document in place, in order. Returns what is wrong with the overrides themselves."""
    problems: list[Problem] = []
    for text in overrides:
        source = f"override {text!r}"
        try:
            _apply(document, text, source)
        except _OverrideError as refused:
            where = dotted(refused.path)
            problems.append(Problem(where, refused.message, source, suggestion=refused.suggestion))
        except ConfigError as error:
            problems += [Problem(item.path, item.message, source) for item in error.problems]
    return problems


def _apply(document: Document, text: str, source: str) -> None:
    name, equals, value_text = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise _OverrideError((), "an override is written a.b.c=value")
    value = parse_value(value_text)
    rest: list[str | int] = [*_start(document, keys[0]), *keys[1:]]
    path: Keys = ()
    container: Any = document.data
    while True:
        key = _key(document, path, container, rest.pop(0))
        if isinstance(container, dict) and _belongs_to_options(document, path, key):
            container = _enter(document, path, container, "options", source)
            path = (*path, "options")
        if not rest:
            container[key] = value
            _note(document, (*path, key), source)
            return
        container = _enter(document, path, container, key, source)
        path = (*path, key)


def _start(document: Document, first: str) -> Keys:
    stages = document.data.get("stages")
    names = list(stages) if isinstance(stages, dict) else []
    if first in RunConfig.model_fields:
        return (first,)
    if first in names:
        return ("stages", first)
    near = nearest(first, [*RunConfig.model_fields, *names])
    raise _OverrideError((first,), "no top-level key and no stage bears this name", near)


def _key(document: Document, path: Keys, container: Any, key: str | int) -> str | int:
    """The key itself, or the position that it means in a list."""
    if not isinstance(container, list):
        return key
    word = str(key)
    if word.isdigit() and int(word) < len(container):
        return int(word)
    tags = [_tag(item) for item in container]
    if models_of(list_item(annotation_at(path, document.data))) and word in tags:
        return tags.index(word)
    known = [tag for tag in tags if tag] or [f"0 to {len(container) - 1}"]
    raise _OverrideError((*path, key), f"no such item; there is {', '.join(known)}")


def _tag(item: Any) -> str:
    return str(item.get("label") or item.get("name") or "") if isinstance(item, dict) else ""


def _belongs_to_options(document: Document, path: Keys, key: str | int) -> bool:
    model = model_at(path, document.data)
    return model is not None and issubclass(model, PluginRef) and key not in model.model_fields


def _enter(document: Document, path: Keys, container: Any, key: str | int, source: str) -> Any:
    """The mapping or list behind a key, made where there is none."""
    inside = container.get(key) if isinstance(container, dict) else container[int(key)]
    if inside is None:
        inside = _default_plugin((*path, key), document)
        _note(document, (*path, key), source)
    elif isinstance(inside, str) and _short_form(document, (*path, key)):
        inside = {"path": inside}
    if not isinstance(inside, dict | list):
        raise _OverrideError((*path, key), "is a value, not a mapping: nothing can be set inside it")
    container[key] = inside
    return inside


def _default_plugin(path: Keys, document: Document) -> dict[str, Any]:
    """An empty mapping; for a plugin that the schema names by default, with its name."""
    model = model_at(path[:-1], document.data)
    info = model.model_fields.get(str(path[-1])) if model else None
    default = info.get_default(call_default_factory=True, validated_data={}) if info else None
    return {"name": default.name} if isinstance(default, PluginRef) else {}


def _short_form(document: Document, path: Keys) -> bool:
    """Whether text stands here for a mapping with a path."""
    models = models_of(annotation_at(path, document.data))
    return any(issubclass(model, ModelConfig | DataConfig) for model in models)


def _note(document: Document, path: Keys, source: str) -> None:
    for known in [known for known in document.places if known[: len(path)] == path]:
        del document.places[known]
    document.places[path] = Place(source)
