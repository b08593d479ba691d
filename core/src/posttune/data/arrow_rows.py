"""Rows of Parquet and Arrow files, a batch at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from posttune.data.blocks import BLOCK_ROWS, ValueBlock
from posttune.data.streams import ByteStream
from posttune.errors import DataError
from posttune.types import BadRow, SourceRow


@dataclass
class ArrowRows:
    """The rows of record batches. ``rows`` count from 1 over the whole file."""

    stream: ByteStream
    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]
    total: int | None  # rows, where the file says
    _done: int = 0

    def __post_init__(self) -> None:
        repeated = [name for name, count in Counter(self.schema.names).items() if count > 1]
        if repeated:
            what = f"has more than one column {repeated[0]!r}"
            raise DataError(what, who=str(self.stream.path), fix="give every column a name of its own")

    @property
    def column_types(self) -> dict[str, str]:
        """Arrow type of each column, as text."""
        return {column.name: str(column.type) for column in self.schema}

    def blocks(self) -> Iterator[ArrowBlock]:
        """Every row, in blocks."""
        for whole in self.batches:
            for start in range(0, whole.num_rows, BLOCK_ROWS):
                part = whole.slice(start, BLOCK_ROWS)
                yield ArrowBlock(str(self.stream.path), self._done + 1, part)
                self._done += part.num_rows

    def progress(self) -> float:
        """Share of the rows that were read."""
        return self._done / self.total if self.total else self.stream.progress()


@dataclass(frozen=True)
class ArrowBlock:
    """Rows of a record batch; ``first`` is the number of the first."""

    file: str
    first: int
    batch: pa.RecordBatch

    def rows(self, warnings: Counter[str]) -> Iterator[SourceRow | BadRow]:
        """Every row; one with text that is no UTF-8 is a bad row."""
        batch = _readable(self.batch)
        try:
            values: list[Any] = _values(batch)
        except (UnicodeDecodeError, ValueError):
            values = [_one(batch.slice(index, 1)) for index in range(batch.num_rows)]
        yield from ValueBlock(self.file, self.first, values).rows(warnings)

    def __reduce__(self) -> tuple[Any, ...]:
        sink = pa.BufferOutputStream()  # as a stream: of a slice only its own part, dictionaries included
        with pa.ipc.new_stream(sink, self.batch.schema) as writer:
            writer.write_batch(self.batch)
        return _from_stream, (self.file, self.first, sink.getvalue())


def _from_stream(file: str, first: int, data: pa.Buffer) -> ArrowBlock:
    return ArrowBlock(file, first, pa.ipc.open_stream(data).read_next_batch())


def parquet_rows(stream: ByteStream) -> ArrowRows:
    """The rows of a Parquet file."""
    file = pq.ParquetFile(stream.seekable())
    batches = file.iter_batches(batch_size=BLOCK_ROWS)
    return ArrowRows(stream, file.schema_arrow, batches, file.metadata.num_rows)


def arrow_file_rows(stream: ByteStream) -> ArrowRows:
    """The rows of an Arrow IPC file."""
    reader = pa.ipc.open_file(stream.seekable())
    batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
    return ArrowRows(stream, reader.schema, batches, None)


def arrow_stream_rows(stream: ByteStream) -> ArrowRows:
    """The rows of an Arrow IPC stream, which is what `datasets` writes."""
    reader = pa.ipc.open_stream(stream.content)
    return ArrowRows(stream, reader.schema, iter(reader), None)


def _readable(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Times as text: exact, where a Python datetime would lose nanoseconds."""
    for index, column in enumerate(batch.schema):
        if pa.types.is_timestamp(column.type):
            batch = batch.set_column(index, column.name, batch.column(index).cast(pa.string()))
    return batch


def _values(batch: pa.RecordBatch) -> list[Any]:
    return list(batch.to_pylist(maps_as_pydicts="lossy"))


def _one(row: pa.RecordBatch) -> dict[str, Any] | str:
    """A row's values, or why they cannot be had."""
    values: dict[str, Any] = {}
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            values[name] = column.to_pylist(maps_as_pydicts="lossy")[0]
        except UnicodeDecodeError as error:
            return f"invalid UTF-8 in column {name!r} at byte {error.start + 1}"
        except ValueError as error:
            return f"column {name!r} cannot be read: {error}"
    return values
