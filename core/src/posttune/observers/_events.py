"""TensorBoard's event files, cut back to a step."""

from __future__ import annotations

import logging
from io import BytesIO
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter

from posttune.files import atomic_write_bytes


def cut_back(folder: Path, global_step: int) -> None:
    """Remove the events of steps after ``global_step``, and a last one that a crash left unfinished.

    A file of which nothing but its header is left goes.
    """
    for path in sorted(folder.rglob("*.tfevents.*")):
        records = read(path)
        kept = [record for record in records if _step(record) <= global_step]
        if not any(_tells(record) for record in kept):
            path.unlink()
            continue
        buffer = BytesIO()
        writer = RecordWriter(buffer)
        for record in kept:
            writer.write(record)
        data = buffer.getvalue()
        if len(data) != path.stat().st_size:
            atomic_write_bytes(path, data)


def read(path: Path) -> list[bytes]:
    """The whole events of a file, up to the first that is damaged."""
    log = logging.getLogger("tensorboard")
    level = log.level
    log.setLevel(logging.ERROR)  # what is cut off is no news
    try:
        return list(RawEventFileLoader(str(path)).Load())
    finally:
        log.setLevel(level)


def _step(record: bytes) -> int:
    return int(Event.FromString(record).step)


def _tells(record: bytes) -> bool:
    return bool(Event.FromString(record).HasField("summary"))
