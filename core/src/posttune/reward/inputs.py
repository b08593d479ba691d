"""Saved answers as samples: any source file, or the rollouts of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttune.data.reading import expand, open_source
from posttune.data.records import MISSING, RowError, as_text, lookup, reference_of
from posttune.errors import DataError
from posttune.nearest import nearest
from posttune.types import BadRow, Completion, Sample, SourceRow

ROLLOUTS = "rollouts"
PROMPT_KEYS = ("prompt", "question")
RESPONSE_KEYS = ("response", "completion", "answer")
REFERENCE_KEYS = ("reference",)


@dataclass(frozen=True)
class Keys:
    """Columns, or dotted paths, by role; None: the first of the usual names that the rows have."""

    prompt: str | None = None
    response: str | None = None
    reference: str | None = None


def read_samples(source: Path, keys: Keys) -> list[Sample]:
    """Every row of a file, or of the rollouts of a run folder, as a sample; its id is ``file:row``.

    Columns without a role reach rewards by name. Raises DataError where a row cannot be read, lacks a
    column that was named, or holds something else than text.
    """
    rows = list(_rows(source))
    if not rows:
        raise DataError("is empty: it holds no rows", who=str(source), fix="name a file with answers")
    columns = list(dict.fromkeys(name for row in rows[:100] for name in row.data))
    chosen = Keys(
        prompt=_choose(keys.prompt, PROMPT_KEYS, columns, rows, "prompt", required=False),
        response=_choose(keys.response, RESPONSE_KEYS, columns, rows, "response", required=True),
        reference=_choose(keys.reference, REFERENCE_KEYS, columns, rows, "reference", required=False),
    )
    return [_sample(row, chosen) for row in rows]


def _rows(source: Path) -> Iterator[SourceRow]:
    folder = source / ROLLOUTS
    for path in expand([folder if folder.is_dir() else source]):
        with open_source(path) as opened:
            for row in opened.rows():
                if isinstance(row, BadRow):
                    who = f"{row.location.file}:{row.location.row}"
                    raise DataError(row.reason, who=who, fix="mend or remove the row")
                yield row


def _choose(
    named: str | None,
    usual: Sequence[str],
    columns: Sequence[str],
    rows: Sequence[SourceRow],
    role: str,
    *,
    required: bool,
) -> str | None:
    if named is not None:
        if all(lookup(row.data, named) is MISSING for row in rows):
            likely = nearest(named, columns)
            hint = f" (did you mean {likely!r}?)" if likely else ""
            raise DataError(
                f"no column {named!r}{hint}", who=f"--{role}-key", fix=f"columns: {', '.join(columns)}"
            )
        return named
    found = next((name for name in usual if name in columns), None)
    if found is None and required:
        what = f"no column is called {' or '.join(usual)}; columns: {', '.join(columns)}"
        raise DataError(what, who=rows[0].location.file, fix=f"name it with --{role}-key")
    return found


def _sample(row: SourceRow, keys: Keys) -> Sample:
    where = f"{row.location.file}:{row.location.row}"
    try:
        response = _value(row.data, keys.response)
        prompt = _value(row.data, keys.prompt)
        return Sample(
            id=f"{Path(row.location.file).name}:{row.location.row}",
            group=str(row.data.get("prompt_id", prompt)),
            prompt=_prompt(prompt),
            response=as_text(response, "response"),
            reference=reference_of(row, keys.reference),
            columns={name: value for name, value in row.data.items() if name not in _roles(keys)},
            completion=_completion(row.data),
        )
    except RowError as error:
        raise DataError(str(error), who=where, fix="mend or remove the row") from error


def _roles(keys: Keys) -> set[str | None]:
    return {keys.prompt, keys.response, keys.reference}


def _value(data: Mapping[str, Any], key: str | None) -> Any:
    value = MISSING if key is None else lookup(data, key)
    return None if value is MISSING else value


def _prompt(value: Any) -> str:
    """Text as it is; a conversation as JSON."""
    if value is None:
        return ""
    return (
        json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else as_text(value, "prompt")
    )


def _completion(data: Mapping[str, Any]) -> Completion | None:
    """The tokens, where a row of rollouts has them."""
    ids = data.get("completion_ids")
    if not isinstance(ids, list):
        return None
    logprobs = data.get("logprobs")
    return Completion(
        request_id=str(data.get("prompt_id", "")),
        index=0,
        token_ids=tuple(ids),
        logprobs=tuple(logprobs) if isinstance(logprobs, list) else None,
        finish_reason=data.get("finish_reason") or "stop",
        weight_version=int(data.get("weight_version") or 0),
    )
