"""pydantic's errors in plain words: what is wrong, where, and what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from posttune.config.document import Document, Keys
from posttune.config.models import STAGES, PluginRef
from posttune.config.places import model_at, models_of
from posttune.errors import Problem
from posttune.nearest import nearest


def schema_problems(error: ValidationError, document: Document) -> list[Problem]:
    """The problems of a whole configuration, in the order of the file."""
    problems = [_problem(detail, document) for detail in error.errors(include_url=False)]
    return sorted(problems, key=lambda problem: problem.line or 0)


def describe_error(detail: ErrorDetails) -> str:
    """One error of pydantic as a short sentence without a subject."""
    rule = _RULES.get(detail["type"])
    if rule is not None:
        return rule(detail)
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return message[:1].lower() + message[1:]


def describe_value(value: object) -> str:
    """What a value is, for the end of "must be …, not …"."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text {value[:60]!r}"
    if isinstance(value, list | tuple):
        return "a list"
    return "a mapping" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def clean(location: tuple[str | int, ...]) -> Keys:
    """The path of an error without the names that pydantic gives to branches of unions."""
    keys = [key for key in location if not (isinstance(key, str) and re.fullmatch(r"<.*>|\[key\]", key))]
    if len(keys) > 2 and keys[0] == "stages":
        del keys[2]
    return tuple(keys)


def suggest_key(key: str, model: type[BaseModel]) -> str:
    """The field that was probably meant: one of the model's, or one a level below it."""
    near = nearest(key, model.model_fields)
    if near:
        return near
    for name, info in model.model_fields.items():
        if any(key in inner.model_fields for inner in models_of(info.annotation)):
            return f"{name}.{key}"
    return ""


def _problem(detail: ErrorDetails, document: Document) -> Problem:
    path = clean(detail["loc"])
    if detail["type"] == "extra_forbidden":
        return _unknown_key(path, document)
    suggestion = ""
    if detail["type"] == "literal_error" and isinstance(detail["input"], str):
        suggestion = nearest(detail["input"], _literals(detail))
    if detail["type"] == "union_tag_invalid":
        path = (*path, "kind")
        suggestion = nearest(detail.get("ctx", {})["tag"], STAGES)
    return document.problem(path, describe_error(detail), suggestion)


def _unknown_key(path: Keys, document: Document) -> Problem:
    key = str(path[-1])
    model = model_at(path[:-1], document.data)
    if model is None:
        return document.problem(path, "unknown key")
    suggestion = suggest_key(key, model)
    if issubclass(model, PluginRef) and not suggestion:
        return document.problem(
            path, "unknown key; a plugin's own options go under options:", f"options.{key}"
        )
    return document.problem(path, "unknown key", suggestion)


def _literals(detail: ErrorDetails) -> list[str]:
    return re.findall(r"'([^']*)'", str(detail.get("ctx", {}).get("expected", "")))


def _must_be(what: str) -> Callable[[ErrorDetails], str]:
    return lambda detail: f"must be {what}, not {describe_value(detail['input'])}"


def _bound(words: str, key: str) -> Callable[[ErrorDetails], str]:
    return lambda detail: f"must be {words} {detail.get('ctx', {})[key]:g}, not {detail['input']}"


def _text(detail: ErrorDetails) -> str:
    branch = detail["loc"][-1] if detail["loc"] else ""
    tagged = isinstance(branch, str) and branch.startswith("<")
    what = str(branch)[1:-1] if tagged else "text"
    message = _must_be(what)(detail)
    scalar = isinstance(detail["input"], bool | int | float)
    return f"{message}; put it in quotes if you mean the text" if scalar and not tagged else message


def _one_of(detail: ErrorDetails) -> str:
    return f"must be one of {', '.join(_literals(detail))}, not {describe_value(detail['input'])}"


def _length(words: str, key: str) -> Callable[[ErrorDetails], str]:
    def describe(detail: ErrorDetails) -> str:
        context = detail.get("ctx", {})
        return f"needs at {words} {context[key]} items, not {context['actual_length']}"

    return describe


def _kind(detail: ErrorDetails) -> str:
    return f"no stage is of kind {detail.get('ctx', {})['tag']!r}; kinds are {', '.join(STAGES)}"


def _rules() -> Iterator[tuple[str, Callable[[ErrorDetails], str]]]:
    yield "missing", lambda _: "is required"
    yield "extra_forbidden", lambda _: "unknown key"
    yield "string_type", _text
    yield "invalid_key", _must_be("text")
    for name in ("int_type", "int_from_float", "int_parsing"):
        yield name, _must_be("an integer")
    for name in ("float_type", "float_parsing"):
        yield name, _must_be("a number")
    yield "finite_number", _must_be("a finite number")
    yield "bool_type", _must_be("true or false")
    for name in ("dict_type", "model_type", "model_attributes_type"):
        yield name, _must_be("a mapping")
    yield "list_type", _must_be("a list")
    yield "literal_error", _one_of
    yield "union_tag_invalid", _kind
    yield "union_tag_not_found", lambda _: f"needs a kind, as its name is none of {', '.join(STAGES)}"
    yield "too_short", _length("least", "min_length")
    yield "too_long", _length("most", "max_length")
    yield "greater_than", _bound("greater than", "gt")
    yield "greater_than_equal", _bound("at least", "ge")
    yield "less_than", _bound("less than", "lt")
    yield "less_than_equal", _bound("at most", "le")


_RULES = dict(_rules())
