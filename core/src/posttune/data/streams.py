"""Bytes of a source file, decompressed by content: the file's name decides nothing."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import lzma
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import pyarrow as pa

from posttune.errors import DataError

PEEK = 512


@dataclass(frozen=True)
class ByteStream:
    """A file's bytes. ``content`` reads them decompressed; ``raw`` tells how far the file was read."""

    path: Path
    size: int
    raw: BinaryIO
    content: io.BufferedReader[Any]
    compression: str  # "" for none

    def progress(self) -> float:
        """Share of the file that was read, 0 to 1."""
        return self.raw.tell() / self.size if self.size and not self.raw.closed else 1.0

    def peek(self) -> bytes:
        """The first bytes, still to be read."""
        return self.content.peek(PEEK)[:PEEK]

    def seekable(self) -> IO[bytes]:
        """The same bytes in a file that can be read from any place: itself, or a copy on the disk."""
        if not self.compression:
            return self.content
        copy = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the reader)
        while block := self.content.read(1 << 20):
            copy.write(block)
        copy.seek(0)
        return copy


def _arrow(codec: str) -> Callable[[BinaryIO], IO[bytes]]:
    def opened(raw: BinaryIO) -> IO[bytes]:
        return cast(IO[bytes], pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec))

    return opened


_CODECS: dict[bytes, tuple[str, Callable[[BinaryIO], IO[bytes]]]] = {
    b"\x1f\x8b": ("gzip", lambda raw: cast(IO[bytes], gzip.GzipFile(fileobj=raw))),
    b"\x28\xb5\x2f\xfd": ("zstd", _arrow("zstd")),
    b"\x04\x22\x4d\x18": ("lz4", _arrow("lz4")),
    b"BZh": ("bzip2", bz2.BZ2File),
    b"\xfd7zXZ\x00": ("xz", lzma.LZMAFile),
    # zstd's frames that hold no data; some writers begin with one
    **{bytes([0x50 + number]) + b"\x2a\x4d\x18": ("zstd", _arrow("zstd")) for number in range(16)},
}


def open_file(path: Path) -> io.BufferedReader:
    """Open a file. Raises `DataError` where that fails, or where it could not be read twice."""
    with reading(path):
        mode = path.stat().st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            raise DataError("is a pipe, not a file", who=str(path), fix="write its content to a file first")
        return path.open("rb")


@contextmanager
def open_bytes(path: Path) -> Iterator[ByteStream]:
    """Open a file; raises `DataError` where that fails. Wrap what reads it in ``reading``."""
    with open_file(path) as raw:
        with reading(path):
            stream = _sniff(path, raw)
        yield stream


def _sniff(path: Path, raw: io.BufferedReader) -> ByteStream:
    head = raw.read(PEEK)
    raw.seek(0)
    size = path.stat().st_size
    for magic, (name, decompress) in _CODECS.items():
        if head.startswith(magic):
            content = io.BufferedReader(cast(io.RawIOBase, decompress(raw)))
            return ByteStream(path, size, raw, content, name)
    return ByteStream(path, size, raw, raw, "")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """The one place where what a library raises over a file becomes a `DataError`."""
    try:
        yield
    except FileNotFoundError:
        raise DataError("no such file", who=str(path), fix="check the path") from None
    except IsADirectoryError:
        raise DataError("is a folder", who=str(path), fix="name the files in it") from None
    except PermissionError:
        raise DataError("cannot be read: permission denied", who=str(path), fix="check its mode") from None
    except EOFError as error:
        raise DataError(f"ends too early: {error}", who=str(path), fix=_FETCH_AGAIN) from error
    except UnicodeError as error:
        raise DataError(f"has text that cannot be decoded: {error}", who=str(path), fix=_ENCODING) from error
    except (OSError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.errno in _PATH_ERRORS:
            what = f"cannot be opened: {error.strerror}"
            raise DataError(what, who=str(path), fix="check the path") from error
        what = f"is damaged: {' '.join(str(error).split())}"
        raise DataError(what, who=str(path), fix=_FETCH_AGAIN) from error


_PATH_ERRORS = (errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG)
_FETCH_AGAIN = "the file is damaged or cut off: fetch or write it again"
_ENCODING = "write the file as UTF-8"
