"""The rows of source files after the converter, ready to be written: one pass, nothing held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path

from posttune.config.models import PluginRef
from posttune.data.reading import SourceFile, open_source
from posttune.data.records import RowError
from posttune.data.rejected import Rejected
from posttune.data.roles import infer_converter, resolve
from posttune.data.writer import Row, prepare
from posttune.facade import Converter, build_converter
from posttune.types import BadRow, Record, SourceRow

Progress = Callable[[int, float], None]  # rows so far, share of the sources that was read

BATCH_ROWS = 1000
BATCH_CHARACTERS = 1 << 23
_LOOKAHEAD = 100  # rows that decide which columns there are


class RowStream:
    """Reads files, converts their rows, and puts bad ones aside in ``rejected``.

    The first file that has rows settles the converter, every file its own columns; ``converter`` and
    ``columns`` (by file) say what was chosen, ``rows_in`` and ``warnings`` what was seen so far.
    """

    def __init__(
        self,
        files: Sequence[Path],
        converter: PluginRef | None,
        mapping: Mapping[str, str],
        rejected: Rejected,
        progress: Progress | None = None,
    ) -> None:
        self.rows_in = 0
        self.warnings: Counter[str] = Counter()
        self.converter: Converter | None = None
        self.columns: dict[str, dict[str, str]] = {}
        self._files = files
        self._ref = converter
        self._mapping = mapping
        self._rejected = rejected
        self._progress = progress

    def rows(self) -> Iterator[Row]:
        """Every good row, in order. Raises `DataError` for files, columns and refused rows."""
        for number, path in enumerate(self._files):
            with open_source(path) as source:
                rows = self._readable(source, number)
                first = list(islice(rows, _LOOKAHEAD))
                if first:
                    converter, columns = self._chosen(first, source)
                    yield from self._converted(converter.convert(chain(first, rows), columns))
                self.warnings.update(source.format.warnings)

    def batches(self) -> Iterator[list[Row]]:
        """The same in lists of bounded size."""
        batch: list[Row] = []
        characters = 0
        for row in self.rows():
            batch.append(row)
            characters += row.characters
            if len(batch) >= BATCH_ROWS or characters >= BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
        if batch:
            yield batch

    def _readable(self, source: SourceFile, number: int) -> Iterator[SourceRow]:
        for row in source.rows():
            self.rows_in += 1
            if self._progress and self.rows_in % BATCH_ROWS == 0:
                self._progress(self.rows_in, (number + source.format.progress()) / len(self._files))
            if isinstance(row, BadRow):
                self._rejected.add(row)
            else:
                yield row

    def _converted(self, records: Iterable[Record | BadRow]) -> Iterator[Row]:
        for record in records:
            if isinstance(record, BadRow):
                self._rejected.add(record)
                continue
            try:
                yield prepare(record, self.warnings)
            except RowError as problem:
                self._rejected.add(BadRow(record.location, str(problem)))

    def _chosen(self, rows: Sequence[SourceRow], source: SourceFile) -> tuple[Converter, dict[str, str]]:
        who, types = str(source.path), source.format.column_types
        if self.converter is None:
            ref = self._ref or PluginRef(name=infer_converter(self._mapping, rows, who))
            self.converter = build_converter(ref)
        roles = self.converter.roles
        columns = resolve(self.converter.name, roles, self._mapping, rows, types, who)
        self.columns[who] = columns
        return self.converter, columns
