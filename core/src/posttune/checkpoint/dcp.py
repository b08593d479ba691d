"""Named tensors in a folder, by torch.distributed.checkpoint.

DCP keeps its index in a pickle, ``.metadata``. It is read here by an unpickler that knows a dozen
data classes and nothing else, so a hostile folder executes nothing; tensors are read by
``torch.load(weights_only=True)``, and entries that are no tensors are refused.
"""

from __future__ import annotations

import logging
import pickle
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from posttune.errors import CheckpointError

_INDEX = ".metadata"
_DAMAGE = (
    pickle.UnpicklingError,
    EOFError,
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What an unpickler raises, or what reads its objects, when the bytes are not those that were written."""
_ALLOWED = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # looks a layout up by name
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "_MEM_FORMAT_ENCODING",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        )
    ),
}


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of DCP's index alone."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which an index of tensors has no use for")


def read_index(folder: Path) -> Metadata:
    """DCP's index of a folder. Executes nothing of it. Raises `CheckpointError`."""
    path = folder / _INDEX
    try:
        with path.open("rb") as file:
            index = _MetadataUnpickler(file).load()
        _check_index(index, path)
    except FileNotFoundError as error:
        raise CheckpointError(
            "has no index of tensors", who=str(path), fix="use another checkpoint"
        ) from error
    except _DAMAGE as error:
        raise CheckpointError(
            f"is refused: {error}",
            who=str(path),
            fix="it is damaged or not to be trusted; use another checkpoint",
        ) from error
    return cast(Metadata, index)


def _check_index(index: object, path: Path) -> None:
    refused = ""
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        refused = "it is no index of tensors"
    elif others := [key for key, entry in index.state_dict_metadata.items() if not _is_tensor(entry)]:
        refused = f"{others[0]!r} is no tensor"
    elif misshapen := [key for key, entry in index.state_dict_metadata.items() if not _has_shape(entry)]:
        refused = f"{misshapen[0]!r} has no shape and type"
    elif outside := [
        info.relative_path for info in index.storage_data.values() if not _is_beside(info.relative_path)
    ]:
        refused = f"it points to a file elsewhere, {outside[0]!r}"
    if refused:
        raise CheckpointError(f"is refused: {refused}", who=str(path), fix="use another checkpoint")


def _is_tensor(entry: object) -> bool:
    return isinstance(entry, TensorStorageMetadata)


def _has_shape(entry: object) -> bool:
    return (
        isinstance(entry, TensorStorageMetadata)
        and isinstance(entry.size, torch.Size)
        and isinstance(entry.properties.dtype, torch.dtype)
    )


def _is_beside(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name != ".."


class _Reader(FileSystemReader):
    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        index = read_index(Path(self.path))
        index.storage_meta = StorageMeta(load_id=self.load_id)
        return index


def shapes(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of every tensor of the folder, by name."""
    entries = cast(dict[str, TensorStorageMetadata], read_index(folder).state_dict_metadata)
    return {name: (tuple(entry.size), entry.properties.dtype) for name, entry in entries.items()}


def write(folder: Path, tensors: Mapping[str, torch.Tensor], *, group: ProcessGroup | None) -> None:
    """Write tensors by name. Every rank of the group calls it; a name that all have is written once.

    Raises `CheckpointError`, after which the folder is to be thrown away.
    """
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
    planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
    try:
        with _silent():
            dcp_save(
                dict(tensors),
                storage_writer=writer,
                planner=planner,
                process_group=group,
                no_dist=group is None,
            )
    except (CheckpointException, OSError) as error:
        raise CheckpointError(
            f"the tensors could not be written: {_cause(error)}",
            who=str(folder),
            fix="see whether the disk is full or the folder is writable",
        ) from error


def read_into(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill the given tensors in place; each must be in the folder with the same shape.

    Each rank reads what it needs by itself. Raises `CheckpointError`, after which the tensors hold
    anything.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    try:
        with _silent():
            dcp_load(dict(tensors), storage_reader=_Reader(folder), planner=planner, no_dist=True)
    except (CheckpointException, OSError, AssertionError, *_DAMAGE) as error:
        raise CheckpointError(
            f"the tensors cannot be read: {_cause(error)}", who=str(folder), fix="use another checkpoint"
        ) from error


logging.getLogger("c10d-NullHandler-dcp_logger").propagate = False  # it tells of every event and error


@contextmanager
def _silent() -> Iterator[None]:
    """Without DCP's warning that one process is one process."""
    if threading.current_thread() is not threading.main_thread():
        # catch_warnings changes what all threads have: here the filter stays, once
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _cause(error: BaseException) -> str:
    """The first failure behind an error: a `CheckpointException`'s own text is a page of tracebacks.

    Where the disk was the reason, what it said: torch's writer then complains of positions in its file.
    """
    if isinstance(error, CheckpointException):
        for failure in error.failures.values():
            return _cause(failure[0])
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError):
            return link.strerror or str(link)
        link = link.__cause__ or link.__context__
    return f"{type(error).__name__}: {error}"
