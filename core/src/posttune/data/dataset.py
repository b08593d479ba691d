"""A converted dataset, memory-mapped: rows are read from the disk when they are asked for."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from posttune.data.layout import EXTRA, FILE, ROLES, ROW, TOKEN_COLUMNS, TRAIN, read_meta
from posttune.errors import DataError
from posttune.types import Location

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase


class SampleDataset:
    """Rows of a dataset folder (or of its ``train.bin``) by index.

    A row is a dict: the roles that the data has, as text (``messages`` is a list of dicts,
    ``reference`` a string or a list of strings), the other columns of the source by their names, and,
    where a tokenizer was given, ``prompt_ids``, ``input_ids`` and ``loss_mask`` (lists; for
    preference data also ``rejected_ids``). ``reference`` falls back to ``response`` where no
    reference was mapped. Raises `DataError` where the path holds no sound dataset.
    """

    def __init__(self, path: str | Path) -> None:
        self.folder = _folder(Path(path))
        self.meta: dict[str, Any] = read_meta(self.folder)
        self._batches = _open(self.folder / TRAIN, self.meta)
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))
        self._tokens = [name for name in TOKEN_COLUMNS if name in self.meta["columns"]]
        self._roles = [name for name in ROLES if name in self.meta["columns"]]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch, row = self._find(index)
        extra = batch.column(EXTRA)[row].as_py()
        found: dict[str, Any] = json.loads(extra) if extra else {}
        for name in self._roles:
            found[name] = batch.column(name)[row].as_py()
        for name in self._tokens:
            values = batch.column(name)[row].values
            found[name] = None if values is None else values.to_numpy(zero_copy_only=False).tolist()
        if "messages" in self._roles and found["messages"]:
            found["messages"] = json.loads(found["messages"])
        if "reference" in self.columns:
            found["reference"] = _reference(found)
        return found

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __reduce__(self) -> tuple[type[SampleDataset], tuple[Path]]:
        return SampleDataset, (self.folder,)

    @property
    def columns(self) -> tuple[str, ...]:
        """What rows hold: roles, tokens, then other columns."""
        roles = list(self._roles)
        if "response" in roles and "reference" not in roles:
            roles.append("reference")
        return (*roles, *self._tokens, *self.metadata_columns)

    @property
    def metadata_columns(self) -> tuple[str, ...]:
        """The columns of the source that have no role; rewards get them by name."""
        return tuple(name for name in self.meta["columns"] if name not in (*ROLES, *TOKEN_COLUMNS))

    def missing(self, column: str) -> int:
        """How many rows lack a value for this column; all of them where there is no such column."""
        if column == "reference" and column not in self._roles:
            column = "response"
        return len(self) - int(self.meta["columns"].get(column, 0))

    @property
    def fingerprint(self) -> str:
        """Changes with the source's content and with how it was converted."""
        return str(self.meta["fingerprint"])

    @property
    def is_tokenized(self) -> bool:
        """Whether the rows hold token ids."""
        return bool(self._tokens)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every row's ``input_ids``."""
        return self._lengths("input_ids")

    @property
    def prompt_lengths(self) -> NDArray[np.int64]:
        """Tokens of every row's ``prompt_ids``."""
        return self._lengths("prompt_ids")

    @property
    def rejected_lengths(self) -> NDArray[np.int64]:
        """Tokens of every row's ``rejected_ids``; 0 where a row has none."""
        return self._lengths("rejected_ids")

    def tokens_of(self, rows: Iterable[int], *columns: str) -> list[int]:
        """Tokens that these token columns of each of the rows have together; for a few rows of many."""
        found = [self._find(row) for row in rows]
        return [sum(_length(batch.column(name)[row]) for name in columns) for batch, row in found]

    def origin(self, index: int) -> str:
        """Where a row came from, as messages say it."""
        location = self.location(index)
        return f"row {location.row} of {location.file}"

    def location(self, index: int) -> Location:
        """Where a row came from."""
        batch, row = self._find(index)
        source = self.meta["sources"][batch.column(FILE)[row].as_py()]
        return Location(source["file"], batch.column(ROW)[row].as_py())

    def tokenized(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        max_length: int | None = None,
        truncation: str = "refuse",
        cache_dir: str | Path | None = None,
    ) -> SampleDataset:
        """This dataset in the ids of ``tokenizer``: itself where it holds them already, else a copy.

        ``template`` is auto, none or a path; None keeps what the dataset records. The copy lies in
        ``cache_dir`` (by default ``tokenized`` in the dataset's folder) and is used again. Raises
        `DataError` for a row longer than ``max_length`` where ``truncation`` is refuse.
        """
        from posttune.data.retokenize import retokenize

        return retokenize(self, tokenizer, template, max_length, truncation, cache_dir)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The record batches of ``train.bin``, memory-mapped."""
        return iter(self._batches)

    def _lengths(self, column: str) -> NDArray[np.int64]:
        if column not in self._tokens:
            what = "the dataset holds text, not tokens"
            raise DataError(
                what, who=str(self.folder), fix="call tokenized() first, or convert with --tokenizer"
            )
        counts = [pc.list_value_length(batch.column(column)).fill_null(0) for batch in self._batches]
        parts = [count.to_numpy(False) for count in counts]
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)

    def _find(self, index: int) -> tuple[pa.RecordBatch, int]:
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"row {index} of a dataset of {len(self)} rows")
        number = bisect_right(self._ends, position)
        return self._batches[number], position - (self._ends[number - 1] if number else 0)


def _length(value: pa.ListScalar) -> int:
    return 0 if value.values is None else len(value.values)


def _reference(row: dict[str, Any]) -> str | list[str] | None:
    values: list[str] | None = row.get("reference")
    if values is None:
        response: str | None = row.get("response")
        return response
    return values[0] if len(values) == 1 else values


def _folder(path: Path) -> Path:
    if path.is_dir():
        return path
    fix = "convert it with `posttune data convert SOURCE --to DIR` and name that folder"
    if not path.exists():
        raise DataError("no such dataset", who=str(path), fix=fix)
    if path.name != TRAIN:
        raise DataError("is a file, not a dataset folder", who=str(path), fix=fix)
    return path.parent


def _open(path: Path, meta: dict[str, Any]) -> list[pa.RecordBatch]:
    try:
        size = path.stat().st_size
        if size != meta["bytes"]:
            what = f"has {size} bytes where meta.json says {meta['bytes']}"
            raise DataError(what, who=str(path), fix="convert the data again")
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        return [reader.get_batch(number) for number in range(reader.num_record_batches)]
    except (OSError, pa.ArrowInvalid, KeyError) as error:
        what = f"cannot be read: {error}"
        raise DataError(what, who=str(path), fix="convert the data again") from error
