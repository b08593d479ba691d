"""Where test data lies, and a short way to convert."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from posttune.config.models import PluginRef
from posttune.data.conversion import ConversionReport, ConvertRequest, convert
from posttune.data.dataset import SampleDataset

ROOT = Path(__file__).parents[3]
SMALL = ROOT / "tests" / "data"
SHARED = ROOT.parent / "shared" / "data"


def manifest(folder: Path) -> list[dict[str, Any]]:
    """The entries of a folder's manifest; none where the folder is absent."""
    path = folder / "MANIFEST.json"
    if not path.is_file():
        return []
    found = json.loads(path.read_text("utf-8"))
    entries: list[dict[str, Any]] = found["files"] if isinstance(found, dict) else found
    return entries


def need(folder: Path) -> None:
    """Skip the test where the data is not there."""
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here")


def run(source: str | Path, to: Path, *, converter: str | None = None, **options: Any) -> ConversionReport:
    """Convert one source."""
    ref = PluginRef(name=converter) if converter else None
    return convert(ConvertRequest(sources=[source], to=to, converter=ref, **options))


def rows_of(source: str | Path, to: Path, **options: Any) -> list[dict[str, Any]]:
    """Convert one source and read it back."""
    return list(SampleDataset(run(source, to, **options).path))


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def write_gzip(path: Path, data: bytes) -> Path:
    """Write compressed bytes."""
    path.write_bytes(gzip.compress(data, mtime=0))
    return path
