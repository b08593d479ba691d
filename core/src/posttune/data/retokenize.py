"""A dataset in another tokenizer's ids: made once, kept beside it, found again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from posttune.data.dataset import SampleDataset
from posttune.data.encoded import Encoded, Truncation
from posttune.data.layout import CACHE, META, ROLES, TOKEN_COLUMNS, dump_meta, is_dataset
from posttune.data.records import RowError
from posttune.data.templates import Template, resolve_template
from posttune.data.tokenize import Encoder, token_meta, token_view, tokenizer_fingerprint
from posttune.data.writer import DatasetWriter, prepare
from posttune.errors import DataError
from posttune.files import atomic_dir
from posttune.types import Record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH = 1000
_DERIVED = ("files", "rows", "bytes", "columns", "lengths", "duplicates", "truncated", "warnings")


def retokenize(
    dataset: SampleDataset,
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    max_length: int | None,
    truncation: str,
    cache_dir: str | Path | None,
) -> SampleDataset:
    """See `SampleDataset.tokenized`."""
    if max_length is None:  # what the conversion asked for holds, where there was no tokenizer yet
        max_length, truncation = dataset.meta["max_length"], dataset.meta["truncation"]
    chosen = _template(dataset, template, tokenizer)
    same = _holds(dataset, tokenizer, chosen)
    if same and _fits(dataset, max_length, truncation):
        return dataset
    identity = [dataset.fingerprint, tokenizer_fingerprint(tokenizer), chosen.source, max_length, truncation]
    fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    folder = Path(cache_dir or dataset.folder / CACHE) / fingerprint[:16]
    if not is_dataset(folder):
        encoder = Encoder(tokenizer, chosen, max_length, cast(Truncation, truncation))
        meta = {
            **{key: value for key, value in dataset.meta.items() if key not in _DERIVED},
            **token_meta(tokenizer, chosen, tokenizer.name_or_path),
            "fingerprint": fingerprint,
            "derived_from": dataset.fingerprint,
            "max_length": max_length,
            "truncation": truncation,
        }
        _write(dataset, encoder, tokenizer.all_special_tokens, folder, meta)
    return SampleDataset(folder)


def _template(dataset: SampleDataset, choice: str | None, tokenizer: PreTrainedTokenizerBase) -> Template:
    """The recorded choice where none is given; a recorded file's text serves without the file."""
    recorded = dataset.meta["template"]
    if choice is None and recorded["choice"] not in ("auto", "none") and recorded["text"] is not None:
        return Template(recorded["choice"], recorded["text"])
    return resolve_template(choice or recorded["choice"], tokenizer)


def _holds(dataset: SampleDataset, tokenizer: PreTrainedTokenizerBase, template: Template) -> bool:
    recorded = dataset.meta["tokenizer"]
    return (
        recorded is not None
        and dataset.meta["template"]["text"] == template.source
        and recorded["fingerprint"] == tokenizer_fingerprint(tokenizer)
    )


def _fits(dataset: SampleDataset, max_length: int | None, truncation: str) -> bool:
    """Whether no row is longer. Raises `DataError` where one is and may not be cut."""
    if max_length is None:
        return True
    lengths = dataset.lengths
    if dataset.meta["columns"].get("rejected_ids"):
        lengths = np.maximum(lengths, dataset.rejected_lengths)
    long = np.flatnonzero(lengths > max_length)
    if len(long) and truncation == "refuse":
        count, first = int(lengths[long[0]]), dataset.location(int(long[0]))
        raise _too_long(
            f"{first.file}:{first.row}", f"{count} tokens, more than the limit of {max_length}", len(long)
        )
    return not len(long)


def _too_long(who: str, what: str, rows: int) -> DataError:
    others = f" (and {rows - 1} rows more)" if rows > 1 else ""
    fix = "raise max_length, or set truncation to left, right or middle"
    return DataError(what + others, who=who, fix=fix)


def _write(
    dataset: SampleDataset, encoder: Encoder, special: list[str], folder: Path, meta: dict[str, Any]
) -> None:
    files = [source["file"] for source in dataset.meta["sources"]]
    with atomic_dir(folder, replace=True) as temporary:
        with DatasetWriter(temporary, files, tokens=True, special=special) as writer:
            for records in _records(dataset):
                encoded = [_checked(record, ids) for record, ids in _encode(encoder, records)]
                writer.add([prepare(record, writer.warnings) for record in records], encoded)
        (temporary / META).write_text(dump_meta({**meta, **writer.summary()}), "utf-8")


def _encode(encoder: Encoder, records: list[Record]) -> Iterator[tuple[Record, Encoded | RowError]]:
    return zip(records, encoder.encode([token_view(record) for record in records]), strict=True)


def _checked(record: Record, ids: Encoded | RowError) -> Encoded:
    if isinstance(ids, RowError):
        raise _too_long(f"{record.location.file}:{record.location.row}", str(ids), 1)
    return ids


def _records(dataset: SampleDataset) -> Iterator[list[Record]]:
    """The rows as records again, in batches."""
    for start in range(0, len(dataset), _BATCH):
        yield [record_of(dataset, index) for index in range(start, min(start + _BATCH, len(dataset)))]


def record_of(dataset: SampleDataset, index: int) -> Record:
    """A row as the record that it was written from."""
    row = dataset[index]
    return Record(
        location=dataset.location(index),
        prompt=row.get("prompt"),
        response=row.get("response"),
        chosen=row.get("chosen"),
        rejected=row.get("rejected"),
        text=row.get("text"),
        messages=tuple(row["messages"]) if row.get("messages") else None,
        reference=row.get("reference") if "reference" in dataset.meta["columns"] else None,
        columns={name: value for name, value in row.items() if name not in (*ROLES, *TOKEN_COLUMNS)},
    )
