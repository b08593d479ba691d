"""From raw rows to records: where a role's value lies and what text it is.

Converters of all kinds stand on these few rules, so that the same value is the same text everywhere.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from posttune.types import BadRow, Record, SourceRow

MISSING = object()


class RowError(Exception):
    """Why a row cannot be used; becomes the reason of a `BadRow`."""


def converted(rows: Iterable[SourceRow], convert: Callable[[SourceRow], Record]) -> Iterator[Record | BadRow]:
    """One record per row, or a bad row where ``convert`` raises `RowError`."""
    for row in rows:
        try:
            yield convert(row)
        except RowError as problem:
            yield BadRow(row.location, str(problem))
        except RecursionError:
            yield BadRow(row.location, "nesting too deep")


def lookup(data: Any, path: str) -> Any:
    """The value at a column, or below others by a dotted path (list places are numbers); or ``MISSING``."""
    if isinstance(data, Mapping) and path in data:
        return data[path]
    head, _, rest = path.partition(".")
    if isinstance(data, Mapping) and head in data:
        return lookup(data[head], rest) if rest else data[head]
    if isinstance(data, list) and head.isdigit() and int(head) < len(data):
        return lookup(data[int(head)], rest) if rest else data[int(head)]
    return MISSING


def value_of(row: SourceRow, role: str, path: str) -> Any:
    """The value of a role. Raises `RowError` where the row has no such column."""
    value = row.data[path] if path in row.data else lookup(row.data, path)
    if value is MISSING:
        raise RowError(f"{role} is missing (no column {path!r})")
    return value


def text_of(row: SourceRow, role: str, path: str) -> str:
    """The text of a role. Raises `RowError` where it is missing, null, blank, or no text or number."""
    text = as_text(value_of(row, role, path), role)
    if not text or text.isspace():
        raise RowError(f"{'blank' if text else 'empty'} {role}")
    return text


def reference_of(row: SourceRow, path: str | None) -> str | list[str] | None:
    """The reference: a text, or a list of texts each of which is right. None where the row has none."""
    value = lookup(row.data, path) if path else None
    if value is None or value is MISSING:
        return None
    if isinstance(value, list | tuple):
        return [as_text(item, "reference") for item in value] or None
    return as_text(value, "reference")


def as_text(value: object, role: str) -> str:
    """Strings as they are, numbers as digits. Raises `RowError` for anything that is neither."""
    if isinstance(value, str):
        return value if value.isascii() else _encodable(value, role)
    if value is None:
        raise RowError(f"{role} is null")
    if isinstance(value, bytes):
        return _decoded(value, role)
    if isinstance(value, bool):
        raise RowError(f"{role} is a bool, not text")
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, int | float):
        return json.dumps(value)
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, list | tuple):
        hint = "; map it to reference to keep every accepted answer" if role == "response" else ""
        raise RowError(f"{role} is a list, not text{hint}")
    kind = "an object" if isinstance(value, Mapping) else f"a {type(value).__name__}"
    raise RowError(f"{role} is {kind}, not text")


def other_columns(row: SourceRow, columns: Mapping[str, str]) -> dict[str, Any]:
    """The row without what has a role: rewards get the rest by name."""
    kept: dict[str, Any] = dict(row.data)
    for path in columns.values():
        _drop(kept, path)
    return kept


def _drop(data: dict[str, Any], path: str) -> None:
    """Remove what lies at a path; the objects on the way are copied, lists stay whole."""
    if path in data:
        del data[path]
        return
    head, _, rest = path.partition(".")
    if rest and isinstance(data.get(head), Mapping):
        below = dict(data[head])
        _drop(below, rest)
        data[head] = below


def _decoded(value: bytes, role: str) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(f"invalid UTF-8 in {role} at byte {error.start + 1}") from None


def _encodable(value: str, role: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(f"lone surrogate in {role} at character {error.start + 1}") from None
    return value
