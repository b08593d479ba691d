"""The free table of an engine's arguments, against the names that the installed engine has."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

from posttune.errors import UserError
from posttune.nearest import nearest

ENTRY = "rollout.options.engine"


def fields_of(source: Path, name: str | None = None) -> set[str]:
    """Annotated fields of a class, or of all, read from source without importing it; empty where none are."""
    found: set[str] = set()
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and name in (None, node.name):
            fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            found |= {target.id for target in fields if isinstance(target, ast.Name)}
    return found


def check_table(
    table: Iterable[str], known: set[str], owned: Mapping[str, str], engine: str, fields: str
) -> None:
    """Raise UserError for an argument that is core's, or that this engine does not have.

    ``owned``: arguments that something else decides, and what does. ``fields``: where the names are found.
    """
    for key in table:
        if key in owned:
            raise UserError(f"{key} is decided by {owned[key]}", who=ENTRY, fix=f"remove {key} there")
        if known and key not in known:
            near = nearest(key, known)
            hint = f" (did you mean {near!r}?)" if near else ""
            fix = f"the names are the fields of {fields} in {engine}"
            raise UserError(f"{engine} has no argument {key!r}{hint}", who=ENTRY, fix=fix)
