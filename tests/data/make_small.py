"""Cuts the shared test data down to what the repository holds. Run it where ``../shared/data`` lies.

    python tests/data/make_small.py ../shared/data

Files of ``bad`` are copied as they are, but for the 3 MB line; files of ``formats`` keep their first
rows, in their own encoding.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

T = TypeVar("T")
ROWS = 50
BYTES = 24_000  # of text; long rows make a file stop earlier
HERE = Path(__file__).parent
HUGE = "one_giant_line.jsonl"


def main(shared: Path) -> None:
    """Write ``bad`` and ``formats`` beside this script."""
    copy_bad(shared / "bad", HERE / "bad")
    cut_formats(shared / "formats", HERE / "formats")


def copy_bad(source: Path, target: Path) -> None:
    """Copy the hostile files and their manifest."""
    for path in sorted(source.iterdir()):
        if path.name == HUGE:
            (target / HUGE).write_bytes(path.read_bytes().replace(b"x" * 29_000, b"x" * 1000))
        else:
            shutil.copyfile(path, target / path.name)


def cut_formats(source: Path, target: Path) -> None:
    """Cut every file of the manifest, and write the manifest with the rows that are left."""
    entries = json.loads((source / "MANIFEST.json").read_text("utf-8"))
    for entry in entries:
        name = Path(entry["file"]).name
        entry["rows"] = cut(source / name, target / name)
        entry["bytes"] = (target / name).stat().st_size
        entry.pop("sha256", None)
    (target / "MANIFEST.json").write_text(json.dumps(entries, indent=1) + "\n", "utf-8")


def cut(source: Path, target: Path) -> int:
    """Write the first rows of a file; returns their number."""
    if source.suffix == ".json":
        rows = _within(json.loads(source.read_text("utf-8")))
        target.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", "utf-8")
        return len(rows)
    if source.suffix == ".jsonl":
        rows = _within(source.read_bytes().split(b"\n")[:-1])
        target.write_bytes(b"".join(row + b"\n" for row in rows))
        return len(rows)
    if source.suffix == ".gz":
        rows = _within(gzip.decompress(source.read_bytes()).split(b"\n")[:-1])
        target.write_bytes(gzip.compress(b"".join(row + b"\n" for row in rows), mtime=0))
        return len(rows)
    return _cut_table(source, target)


def _cut_table(source: Path, target: Path) -> int:
    if source.suffix == ".parquet":
        table = pq.read_table(source)
        table = table.slice(0, len(_within(table.slice(0, ROWS).to_pylist())))
        pq.write_table(table, target, compression="zstd", row_group_size=20)
        return int(table.num_rows)
    stream = "stream" in source.name
    opened = pa.ipc.open_stream(str(source)) if stream else pa.ipc.open_file(str(source))
    table = opened.read_all().slice(0, ROWS)
    write = pa.ipc.new_stream if stream else pa.ipc.new_file
    with write(str(target), table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    return int(table.num_rows)


def _within(rows: list[T]) -> list[T]:
    """The first rows: as many as asked for, and no more text than asked for."""
    kept: list[T] = []
    size = 0
    for row in rows[:ROWS]:
        size += len(row) if isinstance(row, bytes) else len(json.dumps(row))
        if kept and size > BYTES:
            break
        kept.append(row)
    return kept


if __name__ == "__main__":
    main(Path(sys.argv[1]))
