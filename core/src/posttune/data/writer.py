"""Writes ``train.bin`` batch by batch and gathers what ``meta.json`` will say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from posttune.data.columns import Columns, Converted, lengths, lists_of_one, nothing, numbers, strings
from posttune.data.encoded import Encoded
from posttune.data.jsonable import to_json
from posttune.data.layout import EXTRA, FILE, ROLES, ROW, TEXT_ROLES, TOKEN_COLUMNS, TRAIN, arrow_schema
from posttune.data.quality import TextCheck
from posttune.data.records import RowError
from posttune.data.statistics import Tally
from posttune.data.token_columns import TokenColumns
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


def prepare(record: Record, warnings: Counter[str]) -> Row:
    """Make a record writable. Raises `RowError` for a value that JSON cannot hold."""
    if not record.columns and not record.messages:
        return Row(record, None, "{}", ())
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


@dataclass(frozen=True)
class Batch:
    """Rows in the form in which they are stored, and what was counted in them."""

    data: pa.RecordBatch
    tally: Tally

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.data.serialize(), self.data.schema, self.tally)


def _unpickled(data: pa.Buffer, schema: pa.Schema, tally: Tally) -> Batch:
    return Batch(pa.ipc.read_record_batch(data, schema), tally)


class BatchBuilder:
    """Makes batches of rows. ``files`` are the source's, ``special`` the tokenizer's special tokens."""

    def __init__(self, files: Sequence[str], *, tokens: bool, special: Iterable[str] = ()) -> None:
        self.schema = arrow_schema(tokens=tokens)
        self._token_columns = TOKEN_COLUMNS if tokens else ()
        self._file_numbers = {name: number for number, name in enumerate(files)}
        self._check = TextCheck(special)

    def build(self, rows: Sequence[Row], encoded: Sequence[Encoded] | None) -> Batch:
        """The batch of these rows: ``encoded`` is there where the dataset has tokens, one a row."""
        records = [row.record for row in rows]
        columns: dict[str, list[Any]] = {
            role: [getattr(record, role) for record in records] for role in TEXT_ROLES
        }
        columns["messages"] = [row.messages for row in rows]
        columns["reference"] = [_as_list(record.reference) for record in records]
        columns[EXTRA] = [row.extra for row in rows]
        columns[FILE] = [self._file_numbers[record.location.file] for record in records]
        columns[ROW] = [record.location.row for record in records]
        for name in self._token_columns:
            columns[name] = [getattr(item, name) for item in encoded or ()]
        arrays = [pa.array(columns[field.name], field.type) for field in self.schema]
        tally = Tally(rows=len(rows))
        for name in (*ROLES, *self._token_columns):
            tally.columns[name] += len(rows) - columns[name].count(None)
        tally.columns.update(chain.from_iterable([row.extra_names for row in rows]))
        texts = list(zip(*(columns[role] for role in (*TEXT_ROLES, "messages")), strict=True))
        tally.digests.add_all(texts)
        _measure(tally, texts, encoded)
        self._warn(tally, records, texts)
        return Batch(pa.record_batch(arrays, schema=self.schema), tally)

    def build_columns(
        self, source: Columns, found: Converted, used: Collection[str], tokens: TokenColumns | None = None
    ) -> Batch | None:
        """The batch of plain rows; ``used`` columns have a role. None where one hides a role by its name.

        ``tokens`` are there where the dataset has tokens.
        """
        others = [name for name in source.texts if name not in used]
        if any(name in _RESERVED for name in others):
            return None
        count = len(source)
        arrays: dict[str, pa.Array] = {**found.roles}
        given = found.reference
        arrays["reference"] = nothing(count, pa.string()) if given is None else lists_of_one(given)
        arrays[EXTRA] = _extras({name: source.texts[name] for name in others}, count)
        file = self._file_numbers[source.file]
        arrays[FILE] = numbers(np.full(count, file, np.int32), pa.int32())
        arrays[ROW] = numbers(np.arange(source.first, source.first + count, dtype=np.int64), pa.int64())
        tally = Tally(rows=count)
        known = {*found.roles, *([] if given is None else ["reference"])}
        tally.columns.update({name: count if name in known else 0 for name in ROLES})
        if tokens is not None:
            arrays.update(tokens.arrays)
            tally.columns.update({name: count - tokens.arrays[name].null_count for name in TOKEN_COLUMNS})
        tally.columns.update(dict.fromkeys(others, count))
        _measure_columns(tally, found.roles, tokens)
        self._warn_columns(tally, found.roles)
        columns = [
            arrays[field.name] if field.name in arrays else pa.nulls(count, field.type)
            for field in self.schema
        ]
        return Batch(pa.record_batch(columns, schema=self.schema), tally)

    def _warn_columns(self, tally: Tally, roles: Mapping[str, pa.StringArray]) -> None:
        suspects: set[int] = set()
        for column in roles.values():
            data = column.buffers()[2]
            for sign in self._check.signs_in(data.to_pybytes() if data else b""):
                suspects.update(np.flatnonzero(pc.match_substring(column, sign).to_numpy(False)).tolist())
        for index in sorted(suspects):
            texts = [column[index].as_py() for column in roles.values()]
            tally.warnings.update(set().union(*(self._check(text) for text in texts)))

    def _warn(self, tally: Tally, records: Sequence[Record], texts: Sequence[tuple[str | None, ...]]) -> None:
        for record in records:
            if record.chosen is not None and record.chosen == record.rejected:
                tally.warnings["identical_pair"] += 1
        said = [
            [*filter(None, parts[:-1]), _spoken(record)] if record.messages else [*filter(None, parts)]
            for parts, record in zip(texts, records, strict=True)
        ]
        signs = self._check.signs("\n".join(chain.from_iterable(said)))
        for parts in said if signs else ():
            whole = "\n".join(parts).encode("utf-8", "surrogatepass")
            if any(sign in whole for sign in signs):
                tally.warnings.update(set().union(*(self._check(text) for text in parts)))


class DatasetWriter:
    """Appends rows to the ``train.bin`` of a folder. A context manager; ``summary`` is for after it."""

    def __init__(
        self, folder: Path, files: Sequence[str], *, tokens: bool, special: Iterable[str] = ()
    ) -> None:
        self.builder = BatchBuilder(files, tokens=tokens, special=special)
        self._path = folder / TRAIN
        self._tokens = tokens
        self._tally = Tally()

    def __enter__(self) -> DatasetWriter:
        self._sink = pa.OSFile(str(self._path), "wb")
        self._writer = pa.ipc.new_file(self._sink, self.builder.schema)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        self._sink.close()

    @property
    def rows(self) -> int:
        """Rows written so far."""
        return self._tally.rows

    @property
    def warnings(self) -> Counter[str]:
        """What was warned of so far; others may add to it."""
        return self._tally.warnings

    def add(self, rows: Sequence[Row], encoded: Sequence[Encoded] | None) -> None:
        """Append rows."""
        self.append(self.builder.build(rows, encoded))

    def append(self, batch: Batch) -> None:
        """Append a batch, made by a builder with the same files and tokens."""
        self._writer.write_batch(batch.data)
        self._tally.update(batch.tally)

    def summary(self) -> dict[str, Any]:
        """The parts of ``meta.json`` that follow from the rows."""
        tally = self._tally
        duplicates = tally.digests.count()
        for code, count in (("truncated", tally.cut_rows), ("duplicate_rows", duplicates)):
            if count:
                tally.warnings[code] = count
        return {
            "rows": tally.rows,
            "bytes": self._path.stat().st_size,
            "columns": {name: count for name, count in tally.columns.items() if count},
            "lengths": {
                "unit": "tokens" if self._tokens else "characters",
                **{name: counts.summary() for name, counts in tally.lengths.items()},
            },
            "duplicates": duplicates,
            "truncated": {"rows": tally.cut_rows, "tokens": tally.cut_tokens},
            "warnings": [{"code": code, "count": tally.warnings[code]} for code in sorted(tally.warnings)],
        }


def _measure(
    tally: Tally, texts: Sequence[tuple[str | None, ...]], encoded: Sequence[Encoded] | None
) -> None:
    """Count lengths: tokens where there are any, else characters of the roles' texts."""
    if encoded is None:
        prompts = [len(parts[0] or "") for parts in texts]
        totals = [sum([len(text) for text in parts[:-1] if text]) for parts in texts]
    else:
        prompts = [len(item.prompt_ids) for item in encoded]
        totals = [len(item.input_ids) for item in encoded]
        tally.cut_rows += sum(item.cut > 0 for item in encoded)
        tally.cut_tokens += sum(item.cut for item in encoded)
    tally.lengths["prompt"].update(prompts)
    tally.lengths["total"].update(totals)
    tally.lengths["response"].update([total - prompt for prompt, total in zip(prompts, totals, strict=True)])


def _measure_columns(tally: Tally, roles: Mapping[str, pa.StringArray], tokens: TokenColumns | None) -> None:
    """Count lengths, in tokens or characters, and equal rows."""
    if tokens is not None:
        prompts, totals = tokens.prompt, tokens.total
    else:
        sizes = {role: lengths(column) for role, column in roles.items()}
        totals = np.sum(list(sizes.values()), axis=0)
        prompts = sizes.get("prompt", np.zeros_like(totals))
    for part, counts in (("prompt", prompts), ("response", totals - prompts), ("total", totals)):
        tally.lengths[part].update(counts)
    nothing = [None] * tally.rows
    names = (*TEXT_ROLES, "messages")
    tally.digests.add_all(zip(*(roles[n].to_pylist() if n in roles else nothing for n in names), strict=True))


def _extras(columns: Mapping[str, pa.StringArray], count: int) -> pa.StringArray:
    """The JSON text of the columns without a role, a row each."""
    if not columns:
        ends = np.arange(0, 2 * count + 1, 2, dtype=np.int32)
        return pa.StringArray.from_buffers(count, pa.py_buffer(ends), pa.py_buffer(b"{}" * count))
    values = zip(*(column.to_pylist() for column in columns.values()), strict=True)
    return strings([to_json(dict(zip(columns, row, strict=True)), Counter()) for row in values])


def _as_list(reference: str | list[str] | None) -> list[str] | None:
    return [reference] if isinstance(reference, str) else reference


def _spoken(record: Record) -> str:
    """What was said in a conversation: its JSON text would hide control characters behind escapes."""
    return "\n".join(str(message.get("content") or "") for message in record.messages or ())
