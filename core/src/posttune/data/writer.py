"""Writes ``train.bin`` batch by batch and gathers what ``meta.json`` will say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from posttune.data.encoded import Encoded
from posttune.data.jsonable import to_json
from posttune.data.layout import EXTRA, FILE, ROLES, ROW, TEXT_ROLES, TOKEN_COLUMNS, TRAIN, arrow_schema
from posttune.data.quality import TextCheck
from posttune.data.records import RowError
from posttune.data.statistics import Duplicates, Lengths
from posttune.types import Record

_RESERVED = (*ROLES, *TOKEN_COLUMNS, EXTRA, FILE, ROW)
SHADOWED = "source."  # before the name of a column that would hide a role


@dataclass(frozen=True)
class Row:
    """A record ready to be written: its structured parts as JSON text."""

    record: Record
    messages: str | None
    extra: str
    extra_names: tuple[str, ...]  # of the other columns that have a value

    @property
    def characters(self) -> int:
        """About how much memory the row takes."""
        texts = [getattr(self.record, role) or "" for role in TEXT_ROLES]
        return sum(map(len, texts)) + len(self.messages or "") + len(self.extra)


def prepare(record: Record, warnings: Counter[str]) -> Row:
    """Make a record writable. Raises `RowError` for a value that JSON cannot hold."""
    extra: dict[str, Any] = {}
    for name, value in record.columns.items():
        if name in _RESERVED:
            warnings["column_renamed"] += 1
            name = SHADOWED + name
        extra[name] = value
    try:
        messages = to_json(list(record.messages), warnings) if record.messages else None
        text = to_json(extra, warnings)
    except RecursionError:
        raise RowError("nesting too deep") from None
    return Row(record, messages, text, tuple(name for name, value in extra.items() if value is not None))


class DatasetWriter:
    """Appends rows to the ``train.bin`` of a folder. A context manager; ``summary`` is for after it."""

    def __init__(
        self, folder: Path, files: Sequence[str], *, tokens: bool, special: Iterable[str] = ()
    ) -> None:
        self.rows = 0
        self.warnings: Counter[str] = Counter()
        self._path = folder / TRAIN
        self._file_numbers = {name: number for number, name in enumerate(files)}
        self._tokens = tokens
        self._schema = arrow_schema(tokens=tokens)
        self._check = TextCheck(special)
        self._columns: Counter[str] = Counter()
        self._lengths = {name: Lengths() for name in ("prompt", "response", "total")}
        self._duplicates = Duplicates()
        self._cut_rows = 0
        self._cut_tokens = 0

    def __enter__(self) -> DatasetWriter:
        self._sink = pa.OSFile(str(self._path), "wb")
        self._writer = pa.ipc.new_file(self._sink, self._schema)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        self._sink.close()

    def add(self, rows: Sequence[Row], encoded: Sequence[Encoded] | None) -> None:
        """Append a batch: ``encoded`` is there where the dataset has tokens, one a row."""
        columns: dict[str, list[Any]] = {role: [getattr(r.record, role) for r in rows] for role in TEXT_ROLES}
        columns["messages"] = [row.messages for row in rows]
        columns["reference"] = [_as_list(row.record.reference) for row in rows]
        columns[EXTRA] = [row.extra for row in rows]
        columns[FILE] = [self._file_numbers[row.record.location.file] for row in rows]
        columns[ROW] = [row.record.location.row for row in rows]
        for name in TOKEN_COLUMNS if self._tokens else ():
            columns[name] = [getattr(item, name) for item in encoded or ()]
        arrays = [pa.array(columns[field.name], field.type) for field in self._schema]
        self._writer.write_batch(pa.record_batch(arrays, schema=self._schema))
        self.rows += len(rows)
        for name in (*ROLES, *(TOKEN_COLUMNS if self._tokens else ())):
            self._columns[name] += sum(value is not None for value in columns[name])
        for number, row in enumerate(rows):
            self._observe(row, encoded[number] if encoded else None)

    def summary(self) -> dict[str, Any]:
        """The parts of ``meta.json`` that follow from the rows."""
        if self._cut_rows:
            self.warnings["truncated"] = self._cut_rows
        duplicates = self._duplicates.count()
        if duplicates:
            self.warnings["duplicate_rows"] = duplicates
        return {
            "rows": self.rows,
            "bytes": self._path.stat().st_size,
            "columns": {name: count for name, count in self._columns.items() if count},
            "lengths": {
                "unit": "tokens" if self._tokens else "characters",
                **{name: lengths.summary() for name, lengths in self._lengths.items()},
            },
            "duplicates": duplicates,
            "truncated": {"rows": self._cut_rows, "tokens": self._cut_tokens},
            "warnings": [{"code": code, "count": self.warnings[code]} for code in sorted(self.warnings)],
        }

    def _observe(self, row: Row, encoded: Encoded | None) -> None:
        record = row.record
        self._columns.update(row.extra_names)
        texts = [getattr(record, role) for role in TEXT_ROLES]
        self._duplicates.add(*texts, row.messages)
        found = set().union(*(self._check(text) for text in (*texts, _spoken(record)) if text))
        self.warnings.update(found)
        if record.chosen is not None and record.chosen == record.rejected:
            self.warnings["identical_pair"] += 1
        if encoded is None:
            prompt = len(record.prompt or "")
            total = sum(len(text) for text in texts if text)
        else:
            prompt, total = len(encoded.prompt_ids), len(encoded.input_ids)
            self._cut_rows += encoded.cut > 0
            self._cut_tokens += encoded.cut
        for name, length in (("prompt", prompt), ("response", total - prompt), ("total", total)):
            self._lengths[name].add(length)


def _as_list(reference: str | list[str] | None) -> list[str] | None:
    return [reference] if isinstance(reference, str) else reference


def _spoken(record: Record) -> str:
    """What was said in a conversation: its JSON text would hide control characters behind escapes."""
    return "\n".join(str(message.get("content") or "") for message in record.messages or ())
