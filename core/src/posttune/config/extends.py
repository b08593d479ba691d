"""``extends:`` a file takes what another one says, and changes some of it.

Mappings are merged, key by key; anything else replaces what was there. A plugin of another name begins
with options of its own, a stage of another kind is another stage, and a stage that is null is left out.
Of several files the later one counts more. Paths are relative to the file that names them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttune.config.document import Document, Keys, Place, parse, read_text
from posttune.config.environment import Missing, expand
from posttune.config.models import DataConfig, ModelConfig, PluginRef
from posttune.config.places import annotation_at, model_at, models_of
from posttune.config.validate import fill_kinds
from posttune.errors import ConfigError, Problem

KEY = "extends"


def read_extended(document: Document) -> Document:
    """The document with everything that it extends. Raises ConfigError at the line that names a bad file."""
    return _extended(document, (Path(document.file).resolve(),) if document.file else ())


def _extended(document: Document, chain: tuple[Path, ...]) -> Document:
    if KEY not in document.data:
        return document
    named = document.data.pop(KEY)
    names = named if isinstance(named, list) else [named]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise _refused(document, (KEY,), "must be the path of a configuration, or a list of them")
    merged = Document({}, document.file)
    for index, name in enumerate(names):
        path: Keys = (KEY, index) if isinstance(named, list) else (KEY,)
        merged = merge(merged, _read(document, path, name, chain))
    return merge(merged, document)


def _read(document: Document, path: Keys, name: str, chain: tuple[Path, ...]) -> Document:
    try:
        file = Path(document.file).parent / Path(expand(name, os.environ)).expanduser()
    except Missing as error:
        raise _refused(document, path, *error.args) from error
    if file.resolve() in chain:
        loop = " -> ".join(each.name for each in (*chain[chain.index(file.resolve()) :], file))
        raise _refused(document, path, f"the files extend each other: {loop}")
    try:
        text = read_text(file)
    except ConfigError as error:
        raise _refused(document, path, f"{file}: {error.problems[0].message}") from error
    return _extended(parse(text, str(file)), (*chain, file.resolve()))


def _refused(document: Document, path: Keys, message: str, suggestion: str = "") -> ConfigError:
    fix = "`extends:` takes one path or a list, each relative to the file that it stands in"
    return ConfigError([document.problem(path, message, suggestion)], fix=fix)


def merge(base: Document, change: Document) -> Document:
    """What ``base`` says, changed by ``change``. Each value keeps the place where it was written."""
    fill_kinds(base)
    merged = Document(base.data, change.file or base.file, dict(base.places), set(base.quoted))
    _merge(merged, change, merged.data, change.data, ())
    return merged


def _merge(merged: Document, change: Document, old: dict[str, Any], new: dict[str, Any], path: Keys) -> None:
    for key, value in new.items():
        here: Keys = (*path, key)
        if value is None and path == ("stages",):
            old.pop(key, None)
            _forget(merged, here)
            continue
        if key in old and isinstance(value, dict):
            old[key] = _as_mapping(merged, here, old[key])
        if isinstance(value, dict) and isinstance(old.get(key), dict):
            _part(merged, old, here, value)
            _note(merged, change, here)
            _merge(merged, change, old[key], value, here)
            continue
        _forget(merged, here)
        old[key] = value
        _take(merged, change, here)


def _part(merged: Document, old: dict[str, Any], here: Keys, new: dict[str, Any]) -> None:
    """Drop what belonged to another stage or another plugin."""
    inside = old[str(here[-1])]
    if here[:-1] == ("stages",) and new.get("kind") not in (None, inside.get("kind")):
        inside.clear()
    model = model_at(here, merged.data)
    renamed = "name" in new and new["name"] != inside.get("name")
    if model is not None and issubclass(model, PluginRef) and renamed:
        for key in ("options", "label"):
            if inside.pop(key, None) is not None:
                _forget(merged, (*here, key))


def _as_mapping(merged: Document, path: Keys, value: Any) -> Any:
    """The long form of a model or data that was named by its path alone."""
    models = models_of(annotation_at(path, merged.data)) if isinstance(value, str) else []
    short = any(issubclass(model, ModelConfig | DataConfig) for model in models)
    return {"path": value} if short else value


def _forget(document: Document, path: Keys) -> None:
    for known in [known for known in document.places if known[: len(path)] == path]:
        del document.places[known]
    document.quoted -= {known for known in document.quoted if known[: len(path)] == path}


def _take(merged: Document, change: Document, path: Keys) -> None:
    merged.places |= {known: place for known, place in change.places.items() if known[: len(path)] == path}
    merged.quoted |= {known for known in change.quoted if known[: len(path)] == path}


def _note(merged: Document, change: Document, path: Keys) -> None:
    merged.places[path] = change.places.get(path, Place(change.file))


def problem_of_key(problems: Sequence[Problem]) -> list[Problem]:
    """The problems, ``extends`` suggested where it was probably meant."""
    return [
        Problem(each.path, each.message, each.file, each.line, KEY)
        if each.message == "unknown key"
        and each.path in ("extend", "extents", "base", "inherits", "defaults")
        else each
        for each in problems
    ]
