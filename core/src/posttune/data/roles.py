"""Which column has which role, and which converter the roles call for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from posttune.data.layout import ROLES
from posttune.data.records import MISSING, lookup
from posttune.errors import DataError
from posttune.nearest import nearest
from posttune.types import Roles, SourceRow

ALIASES = {"answer": "response"}  # names of roles that mean another

# Columns that have a role without being mapped, the first that exists. "instruction" is not among
# them: where there is one, an "input" belongs to the prompt too, and would be lost.
DEFAULTS = {
    "prompt": ("prompt", "question", "query", "problem"),
    "response": ("response", "answer", "completion"),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
    "messages": ("messages", "conversations", "conversation"),
    "text": ("text",),
    "reference": ("reference", "ground_truth"),
}


def canonical(mapping: Mapping[str, str]) -> dict[str, str]:
    """The same mapping with every role under its own name. Raises `DataError` for an unknown role."""
    found: dict[str, str] = {}
    for name, path in mapping.items():
        role = ALIASES.get(name, name)
        if role not in ROLES:
            near = nearest(name, [*ROLES, *ALIASES])
            hint = f"; did you mean {near!r}?" if near else ""
            raise DataError(f"no role {name!r}{hint}", who="map", fix=f"roles are {', '.join(ROLES)}")
        if role in found:
            raise DataError(f"role {role!r} is mapped twice", who="map", fix="map it to one column")
        found[role] = path
    return found


def infer_converter(mapping: Mapping[str, str], rows: Sequence[SourceRow], who: str = "") -> str:
    """The name of the converter that the mapped roles, or else the columns, call for."""
    if not mapping and _is_alpaca(rows):
        return "alpaca"
    for roles in (set(mapping), set(mapping) | _roles_present(rows)):
        if roles >= {"chosen", "rejected"}:
            return "preference"
        for role, name in (("messages", "messages"), ("response", "prompt_response"), ("text", "text")):
            if role == "messages" and role in roles:
                path = mapping.get(role) or _first(DEFAULTS[role], rows)
                return "sharegpt" if _is_sharegpt(path, rows) else name
            if role in roles:
                return name
    _refuse_half_a_pair(set(mapping) or _roles_present(rows), who)
    if "prompt" in mapping or "prompt" in _roles_present(rows):
        return "prompt_response"
    raise DataError(
        f"no column has a known role; columns are {_shown(columns_of(rows))}",
        who=who,
        fix="say which column is which: --map prompt=COLUMN --map response=COLUMN",
    )


def _refuse_half_a_pair(roles: set[str], who: str) -> None:
    """A better answer without a worse one is no plain prompt: the answer would be lost."""
    pair = {"chosen", "rejected"}
    if len(found := roles & pair) == 1:
        (other,) = pair - found
        fix = f"name it: --map {other}=COLUMN; or take the prompts alone: --converter prompt_response"
        raise DataError(f"a column for {found.pop()}, but none for {other}", who=who, fix=fix)


def resolve(
    converter: str,
    roles: Roles,
    mapping: Mapping[str, str],
    rows: Sequence[SourceRow],
    types: Mapping[str, str],
    who: str = "",
) -> dict[str, str]:
    """Role to dotted path for every role that the converter reads and the source has.

    ``rows`` are the first few of the source, ``types`` its schema. Raises `DataError` for a role
    that the converter does not read, a column that does not exist, and a required role without one.
    """
    known = (*roles.required, *roles.optional)
    foreign = [role for role in mapping if role not in known]
    if foreign:
        what = f"converter {converter!r} does not read the role {foreign[0]!r}"
        raise DataError(what, who=who, fix=f"it reads {', '.join(known)}; choose another with --converter")
    names = {**DEFAULTS, **roles.columns}
    found = {role: path for role in known if (path := mapping.get(role) or _first(names[role], rows))}
    for role, path in found.items():
        _check_column(role, path, rows, types, who)
    for role in roles.required:
        if role not in found:
            what = f"no column for {role}, which converter {converter!r} needs"
            columns = _shown(columns_of(rows))
            raise DataError(f"{what}; columns are {columns}", who=who, fix=f"name it: --map {role}=COLUMN")
    return found


def columns_of(rows: Sequence[SourceRow]) -> list[str]:
    """The top-level columns of these rows, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.data))


def _first(names: Sequence[str], rows: Sequence[SourceRow]) -> str | None:
    present = columns_of(rows)
    return next((name for name in names if name in present), None)


def _roles_present(rows: Sequence[SourceRow]) -> set[str]:
    return {role for role, names in DEFAULTS.items() if _first(names, rows)}


def _is_alpaca(rows: Sequence[SourceRow]) -> bool:
    """Whether there is an instruction and its output, and no other prompt."""
    present = set(columns_of(rows))
    return (
        "instruction" in present
        and bool(present & {"output", "response", "instances"})
        and not present & set(DEFAULTS["prompt"])
    )


def _is_sharegpt(path: str | None, rows: Sequence[SourceRow]) -> bool:
    """Whether the conversations at a path are written with ``from`` and ``value``."""
    first = lookup(rows[0].data, path) if path and rows else MISSING
    return isinstance(first, list) and bool(first) and isinstance(first[0], Mapping) and "from" in first[0]


def _check_column(
    role: str, path: str, rows: Sequence[SourceRow], types: Mapping[str, str], who: str
) -> None:
    if types.get(path) == "null":
        what = f"{role} is all null (column {path!r} has no values)"
        raise DataError(what, who=who, fix=f"map another column: --map {role}=COLUMN")
    if all(lookup(row.data, path) is MISSING for row in rows):
        columns = columns_of(rows)
        near = nearest(path, columns)
        hint = f"; did you mean {near!r}?" if near else ""
        raise DataError(
            f"no column {path!r} for {role}{hint}",
            who=who,
            fix=f"columns are {_shown(columns)}; name one: --map {role}=COLUMN",
        )


def _shown(columns: Collection[str]) -> str:
    names = sorted(columns)
    more = f", … ({len(names)} in all)" if len(names) > 20 else ""
    return ", ".join(names[:20]) + more if names else "none"
