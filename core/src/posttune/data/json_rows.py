"""Rows of JSON lines and of JSON arrays, one at a time, whatever the size of the file."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from posttune.data.blocks import BLOCK_BYTES, ValueBlock, ValueBlocks
from posttune.data.columns import Columns, parse_lines
from posttune.data.streams import ByteStream
from posttune.errors import DataError
from posttune.types import BadRow, Location, SourceRow

_BLOCK = 1 << 16
_SPACE = re.compile(r"[ \t\r\n]*")
_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass
class JsonLines:
    """One object a line. A line ends at a line feed and nowhere else; blank lines hold no row."""

    stream: ByteStream
    column_types: Mapping[str, str] = field(default_factory=dict)

    def blocks(self) -> Iterator[LineBlock]:
        """The lines in blocks; a row's number is its physical line."""
        first = 1
        plain = encoding_of(self.stream.peek()) == "utf-8" and not self.stream.compression
        for data in _line_groups(self.stream):
            end = self.stream.content.tell() if plain else None
            yield LineBlock(str(self.stream.path), first, data, None if end is None else end - len(data))
            first += int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord("\n")))

    def progress(self) -> float:
        """Share of the file that was read."""
        return self.stream.progress()


@dataclass(frozen=True)
class LineBlock:
    """Whole lines in UTF-8; ``first`` is the number of the first.

    ``offset`` is where they lie in the file, if they lie there as they are: another process then reads
    them itself.
    """

    file: str
    first: int
    data: bytes
    offset: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.offset is None:
            return LineBlock, (self.file, self.first, self.data)
        return _from_file, (self.file, self.first, self.offset, len(self.data))

    def rows(self, warnings: Counter[str]) -> Iterator[SourceRow | BadRow]:
        """Every row with its physical line, bad ones among them."""
        quick, exact = _quick_decoder(), _decoder(warnings)
        for number, line in enumerate(self.data.split(b"\n"), start=self.first):
            if not line or line.isspace():
                continue
            location = Location(self.file, number)
            try:
                text = line.decode("utf-8")
                value = _quickly(text, quick)
                if value is None:
                    value = exact.decode(text)
            except (ValueError, RecursionError) as error:
                self._refuse_single_object(line, number)
                yield BadRow(location, _reason(error))
                continue
            yield as_row(location, value)

    def columns(self) -> Columns | None:
        """All rows by column, where they are that plain."""
        return parse_lines(self.file, self.first, self.data)

    def _refuse_single_object(self, line: bytes, number: int) -> None:
        if line.strip() == b"{":
            what = f"line {number}: one JSON object spreads over several lines"
            fix = "write one object a line, or one JSON array of objects"
            raise DataError(what, who=self.file, fix=fix)


def _from_file(file: str, first: int, offset: int, size: int) -> LineBlock:
    with Path(file).open("rb") as source:
        source.seek(offset)
        return LineBlock(file, first, source.read(size), offset)


@dataclass
class JsonArray:
    """The objects of one JSON array. Rows count its elements; a syntax error ends the file."""

    stream: ByteStream
    column_types: Mapping[str, str] = field(default_factory=dict)

    def blocks(self) -> Iterator[ArrayBlock]:
        """Every element of the array, in blocks."""
        window = _Window(self.stream)
        warnings: Counter[str] = Counter()
        decoder = _decoder(warnings)
        blocks = ValueBlocks(str(self.stream.path))
        window.expect("[")
        number = 0
        while not window.skip("]"):
            if number:
                window.expect(",")
            number += 1
            value, size = window.value(decoder)
            found = value if isinstance(value, dict) else _no_object(value)
            for block in blocks.add(found, size):
                yield ArrayBlock(block, Counter(warnings))
                warnings.clear()
        yield from (ArrayBlock(block, warnings) for block in blocks.rest())
        if window.rest():
            window.fail("more data after the end of the array")

    def progress(self) -> float:
        """Share of the file that was read."""
        return self.stream.progress()


@dataclass(frozen=True)
class ArrayBlock:
    """Elements of an array, and what there was to warn of when they were parsed."""

    values: ValueBlock
    found: Counter[str]

    def rows(self, warnings: Counter[str]) -> Iterator[SourceRow | BadRow]:
        """Every row."""
        warnings.update(self.found)
        return self.values.rows(warnings)


def looks_like_array(head: bytes) -> bool:
    """Whether a file begins with an array of objects, or an empty one, rather than with lines."""
    text = head.decode(encoding_of(head), errors="ignore").lstrip("\ufeff \t\r\n")
    return text[:1] == "[" and text[1:].lstrip(" \t\r\n")[:1] in ("{", "]")


def as_row(location: Location, value: Any) -> SourceRow | BadRow:
    """The row for a JSON value, which must be an object."""
    if isinstance(value, dict):
        return SourceRow(location, value)
    return BadRow(location, _no_object(value))


def _no_object(value: Any) -> str:
    return f"not an object but {json_type(value)}"


def json_type(value: object) -> str:
    """What JSON calls a value, with an article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a bool"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, list | tuple) else f"a {type(value).__name__}"


@cache
def _quick_decoder() -> json.JSONDecoder:
    return json.JSONDecoder(parse_constant=_not_json, strict=False)


def _not_json(name: str) -> None:
    raise ValueError(name)


def _quickly(text: str, decoder: json.JSONDecoder) -> dict[str, Any] | None:
    """The object where it is beyond doubt that it repeats no key; else None.

    With no space before a colon every key ends in ``":``, so that there are as many of these as keys,
    unless one was repeated (or they stand in a text as well, which costs nothing but time).
    """
    try:
        value, end = decoder.raw_decode(text)
    except ValueError:
        return None
    if end < len(text) and text[end:].strip(" \t\r"):
        return None
    if not isinstance(value, dict) or " :" in text or "\t:" in text or "\r:" in text:
        return None
    keys = text.count('":')
    return value if keys == len(value) or keys == _keys(value) else None


def _keys(value: Any) -> int:
    """How many keys there are in an object and what is below it."""
    count, left = 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            count += len(item)
            left.extend(item.values())
        elif isinstance(item, list):
            left.extend(item)
    return count


def _decoder(warnings: Counter[str]) -> json.JSONDecoder:
    def constant(_name: str) -> None:
        warnings["non_finite_number"] += 1  # NaN and Infinity are not JSON: kept as null

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            warnings["duplicate_keys"] += 1  # the last one wins, as everywhere
        return found

    # Not strict: a raw TAB in a string is kept.
    return json.JSONDecoder(parse_constant=constant, object_pairs_hook=pairs, strict=False)


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"invalid UTF-8 at byte {error.start + 1} of the line (0x{error.object[error.start]:02x})"
    if isinstance(error, json.JSONDecodeError):
        return f"JSON syntax: {error.msg} (column {error.colno})"
    if isinstance(error, RecursionError):
        return "nesting too deep"
    return "integer too long"  # CPython's limit on digits is the only other ValueError


def encoding_of(head: bytes) -> str:
    """The encoding that the first bytes of JSON tell."""
    for bom, name in _BOMS:
        if head.startswith(bom):
            return name
    if len(head) > 1 and 0 in head[:2]:  # JSON begins with ASCII, so a zero byte there tells UTF-16
        return "utf-16-be" if head[0] == 0 else "utf-16-le"
    return "utf-8"


def _line_groups(stream: ByteStream) -> Iterator[bytes]:
    """Whole lines in UTF-8, some at a time, without the byte order mark of the file."""
    encoding = encoding_of(stream.peek())
    if encoding == "utf-8":
        if stream.peek().startswith(codecs.BOM_UTF8):
            stream.content.read(len(codecs.BOM_UTF8))
        while data := stream.content.read(BLOCK_BYTES):
            yield data if data.endswith(b"\n") else data + stream.content.readline()
        return
    text = io.TextIOWrapper(stream.content, encoding=encoding, newline="\n")
    while part := text.read(BLOCK_BYTES):
        yield (part if part.endswith("\n") else part + text.readline()).encode("utf-8")


class _Window:
    """A part of the text of one JSON array, read on as values are taken from it."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        encoding = "utf-8-sig" if encoding_of(stream.peek()) == "utf-8" else encoding_of(stream.peek())
        self._incremental = codecs.getincrementaldecoder(encoding)()
        self._text = ""
        self._at = 0
        self._line = 1  # of the window's start
        self._before = 0  # letters of that line before it
        self._ended = False

    def value(self, decoder: json.JSONDecoder) -> tuple[Any, int]:
        """The next value, and how many characters it took."""
        self._to_text()
        while True:
            try:
                value, end = decoder.raw_decode(self._text, self._at)
            except RecursionError:
                self.fail("nesting too deep")
            except json.JSONDecodeError as error:
                if not self._may_be_cut(error):
                    self.fail(error.msg, error.pos)
            except ValueError:
                self.fail("integer too long")
            else:
                if end < len(self._text) or self._ended:
                    size, self._at = end - self._at, end
                    return value, size
            self._more(len(self._text) - self._at)

    def skip(self, letter: str) -> bool:
        """Step over a letter if it comes next."""
        self._to_text()
        if self._text[self._at : self._at + 1] != letter:
            return False
        self._at += 1
        return True

    def expect(self, letter: str) -> None:
        """Step over a letter that must come next."""
        if not self.skip(letter):
            self.fail(f"expected {letter!r}")

    def rest(self) -> bool:
        """Whether anything but space is left."""
        self._to_text()
        return self._at < len(self._text)

    def fail(self, what: str, at: int | None = None) -> None:
        """Raise for the place ``at`` in the window, by default the current one."""
        place = self._at if at is None else at
        line = self._line + self._text.count("\n", 0, place)
        start = self._text.rfind("\n", 0, place)
        column = place - start + (self._before if start < 0 else 0)
        ended = " (the file ends here)" if place >= len(self._text) else ""
        raise DataError(
            f"line {line}, column {column}: JSON syntax: {what}{ended}",
            who=str(self._stream.path),
            fix="mend the array; one object a line (JSON lines) would lose only the bad row",
        )

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        """Whether the value may only be incomplete, the error lying at the end of what was read."""
        at_end = error.pos >= len(self._text) - 16
        return not self._ended and (at_end or error.msg.startswith("Unterminated string"))

    def _to_text(self) -> None:
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match else self._at
        while self._at == len(self._text) and not self._ended:
            self._more(0)
            match = _SPACE.match(self._text, self._at)
            self._at = match.end() if match else self._at

    def _more(self, held: int) -> None:
        block = self._stream.content.read(max(_BLOCK, held))  # doubling: a giant value is not rescanned often
        self._ended = not block
        self._line += self._text.count("\n", 0, self._at)
        start = self._text.rfind("\n", 0, self._at)
        self._before = self._at - start - 1 + (self._before if start < 0 else 0)
        self._text = self._text[self._at :] + self._incremental.decode(block, final=self._ended)
        self._at = 0
