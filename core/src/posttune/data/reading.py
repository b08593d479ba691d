"""Source files of any kind that we read, recognised by what they hold and not by their names."""

from __future__ import annotations

import codecs
import glob
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from posttune.data.arrow_rows import arrow_file_rows, arrow_stream_rows, parquet_rows
from posttune.data.blocks import Block
from posttune.data.csv_rows import CsvRows, sniff_csv
from posttune.data.json_rows import JsonArray, JsonLines, encoding_of, looks_like_array
from posttune.data.layout import META, TRAIN
from posttune.data.streams import ByteStream, open_bytes, reading
from posttune.errors import DataError
from posttune.types import BadRow, SourceRow

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather", ".ipc")
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".lz4")
_KINDS = "JSON lines, a JSON array, CSV, Parquet, or Arrow; each may be compressed"
CSV_HEAD = 1 << 13  # bytes that tell CSV from JSON lines


class Format(Protocol):
    """What reads one kind of file."""

    @property
    def column_types(self) -> Mapping[str, str]:
        """Type of each column where the file has a schema; else empty."""
        ...

    def blocks(self) -> Iterator[Block]:
        """Every row, in order, in blocks."""
        ...

    def progress(self) -> float:
        """Share of the file that was read, 0 to 1."""
        ...


@dataclass(frozen=True)
class SourceFile:
    """An open source file of a recognised format."""

    path: Path
    format: Format

    warnings: Counter[str] = field(default_factory=Counter)  # of the rows that ``rows`` gave

    def blocks(self) -> Iterator[Block]:
        """Every row, in order, in blocks. Raises `DataError` where the file turns out to be damaged."""
        with reading(self.path):
            yield from self.format.blocks()

    def rows(self) -> Iterator[SourceRow | BadRow]:
        """Every row, in order; raises as ``blocks`` does."""
        for block in self.blocks():
            yield from block.rows(self.warnings)


@contextmanager
def open_source(path: Path) -> Iterator[SourceFile]:
    """Open a source file. Raises `DataError` for one that is missing, damaged or of no known kind."""
    with open_bytes(path) as stream:
        with reading(path):
            found = _recognise(stream)
        yield SourceFile(path, found)


def expand(sources: Sequence[str | Path]) -> list[Path]:
    """The files that paths, patterns and folders name, in order; those of a folder sorted."""
    files: list[Path] = []
    for source in sources:
        path = Path(source).expanduser()
        if path.is_dir():
            files += _files_of(path)
        elif not path.exists() and glob.has_magic(str(path)):
            files += _matches(path)
        else:
            files.append(path)
    if not files:
        raise DataError("no source file was named", fix="name at least one file")
    return files


def _recognise(stream: ByteStream) -> Format:
    head = stream.peek()
    if head.startswith(b"PAR1"):
        return parquet_rows(stream)
    if head.startswith(b"ARROW1"):
        return arrow_file_rows(stream)
    if head.startswith(b"\xff\xff\xff\xff"):
        return arrow_stream_rows(stream)
    _refuse_foreign(stream.path, head)
    if looks_like_array(head):
        return JsonArray(stream)
    sample = stream.content.peek(CSV_HEAD)[:CSV_HEAD]
    delimiter = sniff_csv(sample, stream.path.name)
    if delimiter is not None:
        return CsvRows(stream, delimiter)
    _refuse_binary(stream.path, sample)
    return JsonLines(stream)


_FOREIGN = {
    b"PARE": "an encrypted Parquet file",
    b"FEA1": "a Feather version 1 file",
    b"PK\x03\x04": "a zip archive (or a spreadsheet)",
    b"\x89HDF": "an HDF5 file",
    b"Obj\x01": "an Avro file",
    b"ORC": "an ORC file",
    b"SQLite": "an SQLite database",
    b"\x80": "a pickle, which could run code when it is read",
    b"%PDF": "a PDF",
    b"version https://git-lfs": "a Git LFS pointer: `git lfs pull` fetches the data itself",
    b"<!DOCTYPE": "a web page: the download may have failed",
    b"<html": "a web page: the download may have failed",
    b"<?xml": "an XML file",
    b"\x1f\x8b": "compressed twice",
    b"\x28\xb5\x2f\xfd": "compressed twice",
}


def _refuse_foreign(path: Path, head: bytes) -> None:
    if head[257:262] == b"ustar":
        raise DataError("is a tar archive", who=str(path), fix="unpack it and name its files")
    for magic, what in _FOREIGN.items():
        if head.startswith(magic):
            raise DataError(f"is {what}", who=str(path), fix=f"convert it to one of: {_KINDS}")


def _refuse_binary(path: Path, sample: bytes) -> None:
    """Raise `DataError` for bytes that are no text and have no row at the beginning of any line."""
    if sample.lstrip()[:1] in (b"", b"{") or b"\n{" in sample or encoding_of(sample) != "utf-8":
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    with suppress(UnicodeDecodeError):
        if "\0" not in decoder.decode(sample):
            return
    raise DataError("holds none of the formats that are read", who=str(path), fix=f"these are {_KINDS}")


def _files_of(folder: Path) -> list[Path]:
    _is_made.cache_clear()
    if _is_made(folder):
        what = "is a converted dataset already, not source files"
        raise DataError(what, who=str(folder), fix="use the folder as it is, or name its original source")
    files = sorted(path for path in folder.rglob("*") if path.is_file() and _is_data(path, folder))
    if not files:
        what = f"is a folder without data files ({', '.join(SUFFIXES)})"
        raise DataError(what, who=str(folder), fix="name the files themselves")
    return files


def _is_data(path: Path, folder: Path) -> bool:
    """Whether a file below a folder is one to read: visible, and of no dataset that was made there."""
    inner = path.relative_to(folder)
    if any(part.startswith(".") for part in inner.parts):
        return False
    if any(_is_made(folder / parent) for parent in inner.parents):
        return False
    name = path.name.lower()
    for suffix in _PACKED:
        name = name.removesuffix(suffix)
    return name.endswith(SUFFIXES)


@lru_cache(maxsize=1024)
def _is_made(folder: Path) -> bool:
    return (folder / META).is_file() and (folder / TRAIN).is_file()


def _matches(pattern: Path) -> list[Path]:
    names = glob.glob(str(pattern), recursive=True)  # noqa: PTH207  (Path.glob takes no absolute pattern)
    files = sorted(path for path in map(Path, names) if path.is_file())
    if not files:
        raise DataError("no file matches the pattern", who=str(pattern), fix="check the path")
    return files
