"""A short cut for plain data: blocks in which every row is a flat object of texts are converted by columns.

It is taken only where it gives, byte for byte, what the way row by row gives; anything unusual in a block (a
number, a null, a blank text, a repeated key, a line that is no row) sends the whole block that other way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pa_json

from posttune.data.records import RowError

References = Sequence[str]


@dataclass(frozen=True)
class Columns:
    """Texts by column, none of them null; ``first`` is the number of the first row."""

    file: str
    first: int
    texts: Mapping[str, pa.StringArray]

    def __len__(self) -> int:
        return len(next(iter(self.texts.values())))


@dataclass(frozen=True)
class Converted:
    """What a converter makes of columns: texts by role, and a reference a row where there is one."""

    roles: Mapping[str, pa.StringArray]
    reference: References | None = None


ConvertColumns = Callable[[Mapping[str, pa.StringArray], Mapping[str, str]], Converted]
"""A converter's way by columns: texts by column, and role to column. Raises `RowError` for any odd row."""


def parse_lines(file: str, first: int, data: bytes) -> Columns | None:
    """The columns of JSON lines, or None where they are not plain."""
    lines = _whole_lines(data)
    if not lines:
        return None
    names = _names(data[: data.find(b"\n") + 1 or None])
    if not names:
        return None
    try:
        table = pa_json.read_json(
            pa.py_buffer(data),
            read_options=pa_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
            parse_options=pa_json.ParseOptions(
                explicit_schema=pa.schema([(name, pa.string()) for name in names]),
                unexpected_field_behavior="error",
            ),
        )
        table.validate(full=True)  # that all is UTF-8
    except pa.ArrowInvalid:
        return None
    if table.num_rows != lines or any(column.null_count for column in table.columns):
        return None
    texts = {name: _whole(table.column(name)) for name in names}
    return Columns(file, first, texts)


def texts_of(column: pa.StringArray) -> list[str]:
    """The texts of a role. Raises `RowError` where one is empty or blank."""
    texts: list[str] = column.to_pylist()
    if any(not text or text.isspace() for text in texts):
        raise RowError("a text is blank")
    return texts


def strings(texts: Sequence[str]) -> pa.StringArray:
    """An Arrow array of texts. (``pa.array`` would import pandas where it is installed.)"""
    data = "".join(texts).encode("utf-8")
    ascii_only = len(data) == sum(map(len, texts))
    sizes = list(map(len, texts)) if ascii_only else [len(text.encode("utf-8")) for text in texts]
    ends = np.cumsum([0, *sizes], dtype=np.int64).astype(np.int32)
    return pa.StringArray.from_buffers(len(texts), pa.py_buffer(ends.tobytes()), pa.py_buffer(data))


def numbers(values: np.ndarray[Any, Any], kind: pa.DataType) -> pa.Array:
    """An Arrow array of numbers."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values.tobytes())])


def lists_of_one(texts: Sequence[str]) -> pa.ListArray:
    """Every text in a list of its own."""
    ends = numbers(np.arange(len(texts) + 1, dtype=np.int32), pa.int32())
    return pa.ListArray.from_arrays(ends, strings(texts))


def no_lists(count: int) -> pa.ListArray:
    """As many nulls in the place of lists of texts, in the buffers that a list of None gives."""
    buffers = [pa.py_buffer(bytes(-(-count // 8))), pa.py_buffer(bytes(4 * (count + 1)))]
    child = pa.StringArray.from_buffers(0, pa.py_buffer(bytes(4)), pa.py_buffer(b""))
    return pa.ListArray.from_buffers(pa.list_(pa.string()), count, buffers, children=[child])


def _whole_lines(data: bytes) -> int:
    """How many lines there are, where all begin and end with a brace; else 0."""
    letters = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(letters == ord("\n"))
    if len(ends) and ends[-1] == len(data) - 1:
        data, ends = data[:-1], ends[:-1]
    before = letters[ends - 1]
    returns = before == ord("\r")
    before = np.where(returns, letters[ends - 1 - returns], before)
    braced = np.all(before == ord("}")) and np.all(letters[ends + 1] == ord("{"))
    plain = data.startswith(b"{") and data.rstrip(b"\r").endswith(b"}")
    return len(ends) + 1 if plain and braced else 0


def _names(line: bytes) -> list[str]:
    """The columns of a line; none where its values are not all texts."""
    try:
        row = json.loads(line)
    except ValueError:
        return []
    plain = isinstance(row, dict) and all(isinstance(value, str) for value in row.values())
    return list(row) if plain else []


def _whole(column: pa.ChunkedArray) -> pa.StringArray:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
