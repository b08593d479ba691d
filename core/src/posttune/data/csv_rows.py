"""Rows of CSV files: a header, then one record a row, whatever separates the fields."""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from posttune.data.blocks import Block, ValueBlocks
from posttune.data.streams import ByteStream
from posttune.errors import DataError

DELIMITERS = (",", "\t", ";", "|")
_LONGEST = 1 << 30  # bytes of a field; the module's own limit is 128 KiB
_BOMS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


@dataclass
class CsvRows:
    """Records of named fields, all of them text. A record's number counts from 1 below the header."""

    stream: ByteStream
    delimiter: str
    column_types: Mapping[str, str] = field(default_factory=dict)

    def blocks(self) -> Iterator[Block]:
        """Every record, in blocks. Raises `DataError` for a header with a column twice, or without a name."""
        encoding = _skip_bom(self.stream)
        # Bytes that are no text come out as lone surrogates, so that they spoil one row and no more.
        text = io.TextIOWrapper(self.stream.content, encoding, "surrogateescape", newline="")
        blocks = ValueBlocks(str(self.stream.path))
        with _long_fields():
            reader = csv.reader(text, delimiter=self.delimiter, strict=True)
            header = self._header(reader)
            while (fields := self._next(reader)) is not None:
                if fields:
                    value = fields if isinstance(fields, str) else _row(header, fields)
                    yield from blocks.add(value, sum(map(len, fields)))
        yield from blocks.rest()

    def progress(self) -> float:
        """Share of the file that was read."""
        return self.stream.progress()

    def _header(self, reader: Iterator[list[str]]) -> list[str]:
        header = self._next(reader)
        if not isinstance(header, list):
            raise DataError(
                "has no header", who=str(self.stream.path), fix="name the columns in its first line"
            )
        names = [name.strip() for name in header]
        repeated = [name for name, count in Counter(names).items() if count > 1 or not name]
        if repeated:
            what = (
                f"has more than one column {repeated[0]!r}" if repeated[0] else "has a column without a name"
            )
            raise DataError(what, who=str(self.stream.path), fix="give every column a name of its own")
        return names

    def _next(self, reader: Any) -> list[str] | str | None:
        """The next record, why there is none, or None at the end."""
        began = reader.line_num + 1
        try:
            fields: list[str] | None = next(reader, None)
        except csv.Error as error:
            if "end of data" in str(error):
                what = f"line {began}: a field's quotation mark is never closed"
                fix = "close it; a quotation mark inside a quoted field is written twice"
                raise DataError(what, who=str(self.stream.path), fix=fix) from error
            return f"CSV syntax: {error} (line {reader.line_num})"
        return fields


def sniff_csv(head: bytes, name: str) -> str | None:
    """What separates the fields, where a file begins like CSV; else None.

    That is a header of at least two different names, none of them a number, before a line with as many
    fields; or a header of one name, where the file is called ``.csv`` or ``.tsv``.
    """
    encoding = next((coding for bom, coding in _BOMS.items() if head.startswith(bom)), None)
    if b"\0" in head[:4] and (encoding is None or head.startswith(codecs.BOM_UTF32_LE)):
        return None
    text = head.decode(encoding or "utf-8", errors="ignore").lstrip("\ufeff")
    if text.lstrip()[:1] in ("", "{", "["):
        return None
    named = name.lower().removesuffix(".gz").removesuffix(".zst").endswith((".csv", ".tsv"))
    for delimiter in DELIMITERS:
        try:
            rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if row]
        except csv.Error:
            continue
        if rows and _is_header(rows, named):
            return delimiter
    return "," if named else None


def _is_header(rows: list[list[str]], named: bool) -> bool:
    names = [name.strip() for name in rows[0]]
    if len(names) < 2 or len(set(names)) < len(names) or not all(map(_is_name, names)):
        return False
    return named or (len(rows) > 1 and len(rows[1]) == len(names) and not rows[1][0].lstrip().startswith("{"))


def _is_name(text: str) -> bool:
    """Whether a text may name a column: it is no JSON value, and no sentence."""
    try:
        json.loads(text)
    except ValueError:
        return bool(text) and len(text) <= 100 and "\n" not in text
    return False


def _row(header: list[str], fields: list[str]) -> dict[str, Any] | str:
    if len(fields) != len(header):
        return f"{len(fields)} fields where the header names {len(header)}"
    for name, text in zip(header, fields, strict=True):
        if not text.isascii() and any("\udc80" <= letter <= "\udcff" for letter in text):
            return f"invalid UTF-8 in column {name!r}"
    return dict(zip(header, fields, strict=True))


def _skip_bom(stream: ByteStream) -> str:
    for bom, encoding in _BOMS.items():
        if stream.peek().startswith(bom):
            stream.content.read(len(bom))
            return encoding
    return "utf-8"


@contextmanager
def _long_fields() -> Iterator[None]:
    """The limit is the module's, not a reader's: it is put back."""
    before = csv.field_size_limit(_LONGEST)
    try:
        yield
    finally:
        csv.field_size_limit(before)
