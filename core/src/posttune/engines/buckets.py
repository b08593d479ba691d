"""Weights on their way to another process: GPU memory by handle, everything else by file, in buckets."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import Tensor

Named = Iterable[tuple[str, "Tensor"]]
_numbers = itertools.count()  # of files: none is overwritten while the other side maps it


@dataclass
class Bucket:
    """Some tensors. ``keep`` are those lent by handle: they must live until the other side is done."""

    handles: list[list[Any]] = field(default_factory=list)
    file: str | None = None
    keep: list[Tensor] = field(default_factory=list)
    size: int = 0

    def describe(self) -> dict[str, Any]:
        """Plain data, from which ``open_bucket`` makes the tensors in another process."""
        return {"handles": self.handles, "file": self.file}

    def free(self) -> None:
        """The other side is done."""
        self.keep.clear()
        if self.file is not None:
            Path(self.file).unlink(missing_ok=True)


def buckets(tensors: Named, limit: int, folder: Path) -> Iterator[Bucket]:
    """Tensors in parts of at most ``limit`` bytes; a larger one is a part of its own."""
    waiting: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        held = tensor.numel() * tensor.element_size()
        if waiting and size + held > limit:
            yield _bucket(waiting, folder)
            waiting, size = [], 0
        waiting.append((name, tensor.detach()))
        size += held
    if waiting:
        yield _bucket(waiting, folder)


def _bucket(tensors: list[tuple[str, Tensor]], folder: Path) -> Bucket:
    from safetensors.torch import save_file

    bucket = Bucket(size=sum(t.numel() * t.element_size() for _, t in tensors))
    written = {}
    for name, tensor in tensors:
        if tensor.is_cuda:
            lent = tensor.contiguous()
            bucket.keep.append(lent)
            bucket.handles.append([name, _to_handle(lent)])
        else:
            written[name] = tensor.contiguous()
    if written:
        path = folder / f"bucket-{next(_numbers)}.safetensors"
        save_file(written, path)
        bucket.file = str(path)
    return bucket


def open_bucket(described: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket. Those by handle are the other process's own memory: read, never kept."""
    from safetensors.torch import load_file

    for name, handle in described["handles"]:
        yield name, _from_handle(handle)
    if described["file"] is not None:
        yield from load_file(described["file"]).items()


def folder_tensors(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of all safetensors files of a folder, a file at a time."""
    from safetensors.torch import load_file

    paths = sorted(Path(folder).glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no safetensors file here: is the folder shared?")
    for path in paths:
        yield from load_file(path).items()


def _to_handle(tensor: Tensor) -> dict[str, Any]:
    """What torch needs to open a GPU tensor in another process, as plain data."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(tensor)
    found = dict(zip(_FIELDS, cast("tuple[Any, ...]", arguments), strict=True))
    uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
    plain = {name: _encode(found[name]) for name in _PLAIN}
    return plain | {"dtype": str(found["dtype"]).removeprefix("torch."), "uuid": uuid}


def _from_handle(plain: dict[str, Any]) -> Tensor:
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    found = {name: _decode(plain[name]) for name in _PLAIN}
    found["size"], found["stride"] = torch.Size(found["size"]), tuple(found["stride"])
    found["dtype"], found["device"] = getattr(torch, plain["dtype"]), _device(plain["uuid"])
    found |= {"tensor_cls": torch.Tensor, "storage_cls": torch.storage.TypedStorage}
    rebuilt: Tensor = cast(Any, rebuild_cuda_tensor)(*(found[name] for name in _FIELDS))
    return rebuilt


def _device(uuid: str) -> int:
    """The number under which this process sees a GPU."""
    import torch

    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise RuntimeError(f"the engine does not see the trainer's GPU {uuid}: check CUDA_VISIBLE_DEVICES")


def _encode(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode("ascii")}
    return list(value) if isinstance(value, tuple) else value


def _decode(value: Any) -> Any:
    return base64.b64decode(value["bytes"]) if isinstance(value, dict) else value


# Arguments of torch.multiprocessing.reductions.rebuild_cuda_tensor, in order (torch 2.11 to 2.14).
_FIELDS = (
    "tensor_cls", "size", "stride", "offset", "storage_cls", "dtype", "device", "handle", "bytes",
    "storage_offset", "requires_grad", "counter_handle", "counter_offset", "event", "event_sync",
)  # fmt: skip
_PLAIN = tuple(name for name in _FIELDS if name not in {"tensor_cls", "storage_cls", "dtype", "device"})
