"""The files of a dataset folder and what they hold.

``train.bin`` is an Arrow IPC file without compression, so that it can be memory-mapped. ``meta.json``
says how it was made. The files of the tokenizer, where there is one, lie beside them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttune.errors import DataError

SCHEMA_VERSION = 1
TRAIN = "train.bin"
META = "meta.json"
REJECTED = "rejected.jsonl"
CACHE = "tokenized"  # copies in other tokenizers' ids

TEXT_ROLES = ("prompt", "response", "chosen", "rejected", "text")
ROLES = (*TEXT_ROLES, "messages", "reference")
TOKEN_COLUMNS = ("prompt_ids", "input_ids", "loss_mask", "rejected_ids")
EXTRA = "columns"  # the other columns of the source, one JSON object a row
FILE, ROW = "source_file", "source_row"  # index into meta's sources; row there, from 1

_NEEDED = (
    *("fingerprint", "rows", "bytes", "columns", "lengths", "duplicates", "warnings", "rejected", "sources"),
    *("tokenizer", "template", "max_length", "truncation"),
)
_TOKEN_TYPES = {
    "prompt_ids": pa.list_(pa.int32()),  # what a rollout continues; a prefix of input_ids
    "input_ids": pa.list_(pa.int32()),
    "loss_mask": pa.list_(pa.bool_()),  # one a token of input_ids
    "rejected_ids": pa.list_(pa.int32()),  # the whole sequence with the rejected response
}


def arrow_schema(*, tokens: bool) -> pa.Schema:
    """The columns of ``train.bin``. Roles that no row has are null throughout."""
    fields = [(role, pa.string()) for role in (*TEXT_ROLES, "messages")]
    fields += [("reference", pa.list_(pa.string())), (EXTRA, pa.string())]
    fields += [(FILE, pa.int32()), (ROW, pa.int64())]
    if tokens:
        fields += list(_TOKEN_TYPES.items())
    return pa.schema(fields)


def read_meta(folder: Path) -> dict[str, Any]:
    """The ``meta.json`` of a dataset folder. Raises `DataError` where there is none that we can read."""
    path = folder / META
    try:
        meta = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise DataError("no dataset (no meta.json)", who=str(folder), fix=_HOW_TO_MAKE_ONE) from None
    except (ValueError, OSError) as error:
        raise DataError(f"cannot be read: {error}", who=str(path), fix="convert the data again") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("schema"), int):
        raise DataError("is not the meta.json of a dataset", who=str(path), fix=_HOW_TO_MAKE_ONE)
    if meta["schema"] > SCHEMA_VERSION:
        what = f"was written by a later posttune (schema {meta['schema']}; this one reads {SCHEMA_VERSION})"
        raise DataError(what, who=str(folder), fix="update posttune, or convert the data again")
    lacks = [key for key in _NEEDED if key not in meta]
    if lacks:
        what = f"is damaged: it lacks {', '.join(lacks[:3])}"
        raise DataError(what, who=str(path), fix="convert the data again")
    return meta


def is_dataset(folder: Path) -> bool:
    """Whether a folder holds a dataset of ours that can be read."""
    try:
        read_meta(folder)
    except DataError:
        return False
    return True


def dump_meta(meta: Mapping[str, Any]) -> str:
    """``meta`` as strict JSON: a NaN in it is an error, not a file that others cannot read."""
    return json.dumps(meta, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


_HOW_TO_MAKE_ONE = "make one with `posttune data convert SOURCE --to DIR` and name that folder"
