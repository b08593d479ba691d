"""What can be refused before a model is read. Imports neither torch nor transformers."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from posttune.config.models import PluginRef
from posttune.errors import ModelError, UserError
from posttune.facade import build_exporter
from posttune.files import refuse_used

DTYPES = ("keep", "float32", "bfloat16", "float16")


def check_export(
    source: Path, to: Path, *, dtype: str, exporter: PluginRef, base: Path | None = None
) -> None:
    """Raise UserError or PluginError where an export cannot begin."""
    check_dtype(dtype)
    build_exporter(exporter)
    check_source(source)
    if base is not None:
        check_source(base)
    check_destination(to)


def check_dtype(dtype: str) -> None:
    """Raise UserError for a type that is none."""
    if dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}", who="export", fix=f"choose one of {', '.join(DTYPES)}")


def check_source(path: Path) -> None:
    """Raise ModelError where there is no folder, or nothing in it."""
    who = f"model {path}"
    if not path.exists():
        fix = "give the path of a local folder; models are not downloaded by name"
        raise ModelError("no such folder", who=who, fix=fix)
    if not path.is_dir():
        fix = "a .gguf file becomes a folder by `posttune models import`"
        raise ModelError("is a file, not a model folder", who=who, fix=fix)
    if not os.access(path, os.R_OK | os.X_OK):
        raise ModelError("cannot be read", who=who, fix="see who may read it")
    if not any(path.iterdir()):
        fix = "give a Hugging Face folder, a checkpoint, a run folder, a PEFT folder or verl's shards"
        raise ModelError("is empty", who=who, fix=fix)


def check_destination(path: Path, *, replace: bool = False) -> None:
    """Raise UserError where a folder cannot be made at ``path``: found out by making one beside it."""
    if not replace:
        refuse_used(path)
    absolute = path.absolute()
    existing = next(place for place in absolute.parents if place.exists())
    try:
        Path(tempfile.mkdtemp(prefix=".posttune-", dir=existing)).rmdir()
    except OSError as error:
        what = f"cannot be made: {existing}: {error.strerror}"
        raise UserError(what, who=str(path), fix="choose a folder where you may write") from error
