"""``${env:NAME}`` and ``${env:NAME:-default}`` in the values of a configuration.

A default is taken where the variable is not set or empty, as in a shell; ``$${env:NAME}`` is the text
``${env:NAME}``. A value that is nothing but a reference becomes a number where the schema wants one; in
a plugin's options it is read as YAML unless it stands in quotes. What stays text is never written to
disk or shown: ``resolved.yaml`` and the like hold the reference.
"""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from posttune.config.document import Document, Keys, parse_value
from posttune.config.places import alternatives, annotation_at
from posttune.errors import ConfigError, Problem
from posttune.nearest import nearest

_REFERENCE = re.compile(r"\$\$\{env:|\$\{env:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")
_BEGUN = re.compile(r"(?<!\$)\$\{env:")
_NUMBERS = (int, float, bool)


@dataclass(frozen=True)
class Resolved:
    """What was resolved: the text of every reference by its path, and what was wrong."""

    references: dict[Keys, str]
    problems: list[Problem]


class Missing(Exception):
    """A variable that is not set."""


def resolve_environment(document: Document, environ: Mapping[str, str] | None = None) -> Resolved:
    """Put the values of variables in their places, in the document itself."""
    variables = os.environ if environ is None else environ
    found = Resolved({}, [])
    for holder, key, path in list(_texts(document.data, ())):
        text = holder[key]
        if "${env:" not in text:
            continue
        try:
            value = expand(text, variables)
        except Missing as error:
            found.problems.append(document.problem(path, *error.args))
            continue
        holder[key] = _typed(document, path, text, value)
        if isinstance(holder[key], str) and not _is_choice(document, path):
            found.references[path] = text
    return found


def expand(text: str, environ: Mapping[str, str]) -> str:
    """The text with every reference replaced."""

    def value(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        if name is None:
            return "${env:"
        if default is not None:
            return environ.get(name) or default
        if name not in environ:
            near = nearest(name, environ)
            raise Missing(f"the environment variable {name} is not set, and has no default (:-)", near)
        return environ[name]

    if len(_BEGUN.findall(text)) > sum(match["name"] is not None for match in _REFERENCE.finditer(text)):
        raise Missing("no reference: write ${env:NAME}, or ${env:NAME:-default}", "")
    return _REFERENCE.sub(value, text)


def without_values(
    problems: list[Problem], document: Document, references: Mapping[Keys, str]
) -> list[Problem]:
    """The problems with references where their messages show what a variable holds."""
    shown = {_at(document.data, path): text for path, text in references.items()}
    return [
        Problem(each.path, _hidden(each.message, shown), each.file, each.line, each.suggestion)
        for each in problems
    ]


def _hidden(message: str, shown: Mapping[str, str]) -> str:
    for value, text in shown.items():
        if value:
            message = message.replace(repr(value[:60]), repr(text))
    return message


def _at(data: Any, path: Keys) -> Any:
    for key in path:
        data = data[key]
    return data


def _typed(document: Document, path: Keys, text: str, value: str) -> Any:
    """A number where the schema wants one and the value is nothing but a reference; else the text."""
    match = _REFERENCE.fullmatch(text)
    if match is None or match["name"] is None:
        return value
    wanted = alternatives(annotation_at(path, document.data))
    if any(kind in wanted for kind in _NUMBERS) or (
        wanted in ([None], [Any]) and path not in document.quoted
    ):
        return _scalar(value)
    return value


def _is_choice(document: Document, path: Keys) -> bool:
    """Whether the schema names the values that are possible: none of them is a secret."""
    return any(
        typing.get_origin(each) is typing.Literal for each in alternatives(annotation_at(path, document.data))
    )


def _scalar(text: str) -> Any:
    try:
        value = parse_value(text)
    except ConfigError:
        return text
    return text if value is None or isinstance(value, dict | list) else value


def _texts(data: Any, path: Keys) -> Iterator[tuple[Any, Any, Keys]]:
    """The holder, key and path of every text."""
    pairs = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in pairs:
        if isinstance(value, str):
            yield data, key, (*path, key)
        else:
            yield from _texts(value, (*path, key))
