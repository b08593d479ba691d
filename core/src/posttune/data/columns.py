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
import pyarrow.compute as pc
import pyarrow.json as pa_json

from posttune.data.records import RowError


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
    reference: pa.StringArray | None = None


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


def check_blank(column: pa.StringArray) -> None:
    """Raises `RowError` where a text is empty or blank."""
    ends, letters = parts(column)
    if not len(letters):
        raise RowError("a text is blank")
    first = letters[np.minimum(ends[:-1], len(letters) - 1)]
    visible = (first > ord(" ")) & (first < 0x7F) & (ends[1:] > ends[:-1])
    for index in np.flatnonzero(~visible).tolist():
        text = column[index].as_py()
        if not text or text.isspace():
            raise RowError("a text is blank")


def parts(column: pa.StringArray) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Where the texts begin and end, and their bytes one behind the other."""
    _, ends, data = column.buffers()
    places = np.frombuffer(ends, np.int32)[column.offset : column.offset + len(column) + 1]
    return places, np.frombuffer(data or b"", np.uint8)


def strings(texts: Sequence[str]) -> pa.StringArray:
    """An Arrow array of texts. (``pa.array`` would import pandas where it is installed.)"""
    data = "".join(texts).encode("utf-8")
    ascii_only = len(data) == sum(map(len, texts))
    sizes = list(map(len, texts)) if ascii_only else [len(text.encode("utf-8")) for text in texts]
    ends = np.cumsum([0, *sizes], dtype=np.int64).astype(np.int32)
    return pa.StringArray.from_buffers(len(texts), pa.py_buffer(ends), pa.py_buffer(data))


def lengths(column: pa.StringArray) -> np.ndarray[Any, Any]:
    """int64 [rows]: the characters of each text."""
    ends, letters = parts(column)
    if letters[ends[0] : ends[-1]].max(initial=0) < 0x80:
        return np.diff(ends).astype(np.int64)
    return np.asarray(pc.utf8_length(column).to_numpy(False), np.int64)


def cut_out(column: pa.StringArray, starts: np.ndarray[Any, Any]) -> pa.StringArray:
    """The ends of the texts, from a byte (counted over the whole column) on. They should be short."""
    ends, letters = parts(column)
    sizes = ends[1:] - starts
    bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    places = np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], sizes)
    data = np.ascontiguousarray(letters[places])
    return pa.StringArray.from_buffers(len(sizes), pa.py_buffer(bounds), pa.py_buffer(data))


def numbers(values: np.ndarray[Any, Any], kind: pa.DataType) -> pa.Array:
    """An Arrow array of numbers."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def lists_of_one(texts: pa.StringArray) -> pa.ListArray:
    """Every text in a list of its own."""
    ends = numbers(np.arange(len(texts) + 1, dtype=np.int32), pa.int32())
    return pa.ListArray.from_arrays(ends, texts)


def nothing(count: int, kind: pa.DataType) -> pa.ListArray:
    """As many nulls in the place of lists of ``kind``, in the buffers that a list of None gives."""
    buffers = [pa.py_buffer(bytes(-(-count // 8))), pa.py_buffer(bytes(4 * (count + 1)))]
    child = pa.array([], kind)
    return pa.ListArray.from_buffers(pa.list_(kind), count, buffers, children=[child])


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
