"""Whole tensors out of the pieces that each process of a group has saved (DTensor, or plain)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from posttune.errors import CheckpointError

Box = tuple[tuple[int, int], ...]
"""Where a piece lies: first and last index, half open, by dimension."""
_FIX = "save it again, or take another checkpoint"


def assemble(who: str, name: str, pieces: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The tensor of which every rank holds a piece. ``pieces``: by rank.

    A DTensor says where its piece lies; plain tensors are replicas, as buffers are. Replicas must be
    equal. Raises `CheckpointError` where they are not, or where a part of the tensor is in no piece.
    """
    sharded = {rank for rank, piece in pieces.items() if isinstance(piece, DTensor)}
    if sharded and len(sharded) != len(pieces):
        raise CheckpointError(f"{name} is a shard on some ranks, whole on others", who=who, fix=_FIX)
    first = pieces[min(pieces)]
    if any(piece.shape != first.shape or piece.dtype != first.dtype for piece in pieces.values()):
        what = f"{name} has another shape or type on some rank: {_kinds(pieces)}"
        raise CheckpointError(what, who=who, fix=_FIX)
    if not sharded:
        return _replicated(who, name, pieces)
    whole = torch.empty(first.shape, dtype=first.dtype)
    filled: set[Box] = set()
    for rank, piece in sorted(pieces.items()):
        assert isinstance(piece, DTensor)
        box, local = _box_of(who, name, rank, piece), piece.to_local()
        if tuple(local.shape) != tuple(stop - start for start, stop in box):
            what = f"{name} of rank {rank} is {list(local.shape)}, its place {_text(box)}"
            raise CheckpointError(what, who=who, fix=_FIX)
        place = whole[tuple(slice(start, stop) for start, stop in box)]
        if box in filled:
            _check_equal(who, name, rank, place, local)
        place.copy_(local)
        filled.add(box)
    if sum(_volume(box) for box in filled) != whole.numel():
        raise CheckpointError(f"parts of {name} are on no rank", who=who, fix=_FIX)
    return whole


def _replicated(who: str, name: str, pieces: Mapping[int, torch.Tensor]) -> torch.Tensor:
    first = pieces[min(pieces)]
    for rank, piece in pieces.items():
        _check_equal(who, name, rank, first, piece)
    return first


def _check_equal(who: str, name: str, rank: int, one: torch.Tensor, other: torch.Tensor) -> None:
    same = one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    if not torch.equal(*same):  # bits: NaN equals NaN
        what = f"{name} is a replica on several ranks, and that of rank {rank} has other values"
        raise CheckpointError(what, who=who, fix=_FIX)


def _kinds(pieces: Mapping[int, torch.Tensor]) -> str:
    kinds = {f"{list(piece.shape)} {str(piece.dtype).removeprefix('torch.')}" for piece in pieces.values()}
    return ", ".join(sorted(kinds))


def _box_of(who: str, name: str, rank: int, piece: DTensor) -> Box:
    mesh = piece.device_mesh.mesh
    at = (mesh == rank).nonzero()
    if len(at) != 1:
        raise CheckpointError(f"{name}: rank {rank} is not in its mesh {mesh.tolist()}", who=who, fix=_FIX)
    for placement in piece.placements:
        if not isinstance(placement, Replicate) and not _is_shard(placement):
            what = f"{name} is placed as {placement}: its values are not final"
            raise CheckpointError(what, who=who, fix=_FIX)
    return box_of(tuple(piece.shape), tuple(mesh.shape), tuple(at[0].tolist()), piece.placements)


def box_of(
    shape: Sequence[int], mesh: Sequence[int], at: Sequence[int], placements: Sequence[Placement]
) -> Box:
    """What the process at ``at`` of a mesh holds of a tensor.

    Mesh dimensions cut one after the other, each as `torch.chunk` does (the last piece may be smaller,
    or empty). A strided shard, which FSDP makes of what tensor parallelism has cut, cuts last.
    """
    box = [(0, size) for size in shape]
    places = [(place, count, index) for place, count, index in zip(placements, mesh, at, strict=True)]
    plain = [each for each in places if _is_shard(each[0]) and not _is_strided(each[0])]
    strided = [each for each in reversed(places) if _is_strided(each[0])]
    for placement, count, index in (*plain, *strided):
        dim: int = placement.dim  # type: ignore[attr-defined]  # a shard has one
        start, stop = box[dim]
        size = math.ceil((stop - start) / count)
        box[dim] = (min(start + index * size, stop), min(start + (index + 1) * size, stop))
    return tuple(box)


def _is_strided(placement: Placement) -> bool:
    return type(placement).__name__ == "_StridedShard"


def _is_shard(placement: Placement) -> bool:
    return isinstance(placement, Shard) or _is_strided(placement)


def _volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def _text(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"
