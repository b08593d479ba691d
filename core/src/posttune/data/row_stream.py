"""From source files to batches of a dataset, a block at a time: here, or in several processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from threading import Lock

from posttune.config.models import PluginRef
from posttune.data.blocks import Block
from posttune.data.columns import ConvertColumns
from posttune.data.encoded import Encoded
from posttune.data.json_rows import LineBlock
from posttune.data.reading import SourceFile, open_source
from posttune.data.records import RowError
from posttune.data.roles import infer_converter, resolve
from posttune.data.tokenize import Encoder, token_view
from posttune.data.writer import Batch, BatchBuilder, Row, prepare
from posttune.facade import Converter, build_converter
from posttune.types import BadRow, SourceRow

Progress = Callable[[int, float], None]  # rows so far, share of the sources that was read

_LOOKAHEAD = 100  # rows that decide which columns there are
_LOOKAHEAD_BLOCKS = 8


@dataclass(frozen=True)
class Task:
    """A block to convert. ``columns`` (role to path) is None where the block holds no row at all."""

    block: Block
    columns: Mapping[str, str] | None


@dataclass
class Outcome:
    """What became of a block."""

    rows_in: int = 0
    rejected: list[BadRow] = field(default_factory=list)
    warnings: Counter[str] = field(default_factory=Counter)
    batch: Batch | None = None  # None: no row is left
    quick: bool = False  # converted by columns


class TaskStream:
    """The blocks of the source files, in order.

    The first file that has rows settles the converter, every file its own columns; ``converter`` and
    ``columns`` (by file) say what was chosen so far.
    """

    def __init__(
        self, files: Sequence[Path], converter: PluginRef | None, mapping: Mapping[str, str]
    ) -> None:
        self.converter: Converter | None = None
        self.columns: dict[str, dict[str, str]] = {}
        self.share = 0.0  # of the sources that was read
        self._files = files
        self._ref = converter
        self._mapping = mapping

    def tasks(self) -> Iterator[Task]:
        """Every block. Raises `DataError` for files and columns."""
        for number, path in enumerate(self._files):
            with open_source(path) as source:
                for task in self._tasks(source):
                    self.share = (number + source.format.progress()) / len(self._files)
                    yield task

    def _tasks(self, source: SourceFile) -> Iterator[Task]:
        blocks = source.blocks()
        held: list[Block] = []
        first: list[SourceRow] = []
        for block in blocks:
            rows = _good_rows(block)
            if not first and not rows:
                yield Task(block, None)
                continue
            held.append(block)
            first += rows[: _LOOKAHEAD - len(first)]
            if len(first) >= _LOOKAHEAD or len(held) >= _LOOKAHEAD_BLOCKS:
                break
        if first:
            columns = self._chosen(first, source)
            yield from (Task(block, columns) for block in chain(held, blocks))

    def _chosen(self, rows: Sequence[SourceRow], source: SourceFile) -> Mapping[str, str]:
        who, types = str(source.path), source.format.column_types
        if self.converter is None:
            ref = self._ref or PluginRef(name=infer_converter(self._mapping, rows, who))
            self.converter = build_converter(ref)
        columns = resolve(self.converter.name, self.converter.roles, self._mapping, rows, types, who)
        self.columns[who] = columns
        return columns


def _good_rows(block: Block) -> list[SourceRow]:
    return [row for row in block.rows(Counter()) if isinstance(row, SourceRow)]


def convert_rows(task: Task, converter: Converter | None, outcome: Outcome) -> Iterator[Row]:
    """Every good row of a block; the bad ones and what was warned of go to ``outcome``."""
    good = _counted(task.block, outcome)
    if task.columns is None or converter is None:
        for _ in good:
            raise AssertionError("a block without columns holds rows")
        return
    for record in converter.convert(good, task.columns):
        if isinstance(record, BadRow):
            outcome.rejected.append(record)
            continue
        try:
            yield prepare(record, outcome.warnings)
        except RowError as problem:
            outcome.rejected.append(BadRow(record.location, str(problem)))


def _counted(block: Block, outcome: Outcome) -> Iterator[SourceRow]:
    for row in block.rows(outcome.warnings):
        outcome.rows_in += 1
        if isinstance(row, BadRow):
            outcome.rejected.append(row)
        else:
            yield row


class BlockConverter:
    """Converts blocks one after the other. What it answers depends on the block alone."""

    def __init__(self, converter: Converter | None, encoder: Encoder | None, builder: BatchBuilder) -> None:
        self._converter = converter
        self._encoder = encoder
        self._builder = builder
        self._one_by_one = Lock()

    @property
    def has_columns(self) -> bool:
        """Whether plain blocks are converted by columns: that may be done in several threads."""
        return self._way() is not None and (self._encoder is None or self._encoder.has_columns)

    def __call__(self, task: Task) -> Outcome:
        """The block's rows as a batch, and its bad rows."""
        quick = self._by_columns(task)
        if quick is not None:
            return quick
        with self._one_by_one:  # a converter's hooks are written for one thread
            return self._by_rows(task)

    def _way(self) -> ConvertColumns | None:
        return self._converter.convert_columns if self._converter is not None else None

    def _by_rows(self, task: Task) -> Outcome:
        outcome = Outcome()
        rows = list(convert_rows(task, self._converter, outcome))
        encoded: list[Encoded] | None = None
        if self._encoder is not None:
            rows, encoded = _encoded(rows, self._encoder, outcome)
        if rows:
            outcome.batch = self._builder.build(rows, encoded)
        return outcome

    def _by_columns(self, task: Task) -> Outcome | None:
        """What becomes of a block of plain rows; None for any other."""
        way = self._way()
        if way is None or task.columns is None:
            return None
        if not isinstance(task.block, LineBlock) or (found := task.block.columns()) is None:
            return None
        if any(path not in found.texts for path in task.columns.values()):
            return None
        try:
            converted = way(found.texts, task.columns)
        except RowError:
            return None
        tokens = None
        if self._encoder is not None:
            tokens = self._encoder.columns(converted.roles)
            if tokens is None:
                return None
        batch = self._builder.build_columns(found, converted, set(task.columns.values()), tokens)
        return None if batch is None else Outcome(rows_in=len(found), batch=batch, quick=True)


def _encoded(rows: Sequence[Row], encoder: Encoder, outcome: Outcome) -> tuple[list[Row], list[Encoded]]:
    kept: list[Row] = []
    encoded: list[Encoded] = []
    for row, ids in zip(rows, encoder.encode([token_view(row.record) for row in rows]), strict=True):
        if isinstance(ids, RowError):
            outcome.rejected.append(BadRow(row.record.location, str(ids)))
        else:
            kept.append(row)
            encoded.append(ids)
    return kept, encoded
