"""Checkpoints of a training run: folders ``global_step_N`` that are whole or not there.

    tensors/      weights, optimiser state, random generators (torch.distributed.checkpoint)
    hf/           configuration and tokenizer of the model, as Hugging Face files
    meta.json     format, step, adapters, base model
    state.json    whatever the trainer wants back
    optimizer.json, run_config.json
    parts.json    the models beside the main one (a critic), where there are any
    COMPLETE      written last: the name and size of every other file

With adapters on a base that is a folder, the adapters alone are kept, and where the base lies.
Names hold no world size: a checkpoint resumes with any number of processes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from posttune._version import __version__
from posttune.checkpoint import dcp, rng, training_state
from posttune.checkpoint.parts import (
    MAIN,
    Described,
    Filling,
    Part,
    check_names,
    prepare_filling,
    tensors_of,
    weights_to_fill,
)
from posttune.distributed.ranks import Ranks
from posttune.errors import CheckpointError
from posttune.files import atomic_dir
from posttune.models.lora import describe, inner_model
from posttune.models.tokenizer import save_tokenizer

log = logging.getLogger("posttune.checkpoint")

FORMAT = 1
MARKER = "COMPLETE"
TENSORS = "tensors"
HF = "hf"
PARTS = "parts.json"
_NAME = re.compile(r"global_step_(\d+)")
_PROBE = 1 << 20


@dataclass(frozen=True)
class Meta(Described):
    """What a checkpoint says of itself, and of its main model."""

    format: int
    posttune: str
    step: int


def save(
    folder: Path,
    step: int,
    *,
    model: nn.Module,
    optimizer: Optimizer | None,
    state: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    config: Mapping[str, Any],
    ranks: Ranks | None = None,
    base: Path | None = None,
    parts: Mapping[str, Part] | None = None,
) -> Path:
    """Write ``folder/global_step_<step>`` and return its path. Every rank calls it.

    ``state`` and ``config`` (the resolved run) are JSON data. ``base``: the folder whose weights the
    adapters belong to; without it all weights are kept. ``parts``: models beside the main one by
    name, each with its optimiser, such as a critic. A checkpoint of that step gives way.
    Raises `CheckpointError`, and then leaves no trace.
    """
    ranks = ranks or Ranks()
    path = folder / f"global_step_{step}"
    main = Part(model, optimizer, base)
    tensors = tensors_of({MAIN: main, **(parts or {})})
    tensors |= {f"rng/{ranks.rank}/{name}": value for name, value in rng.capture().items()}
    if ranks.rank > 0:
        _write_part(tensors, ranks, path)
        return path
    meta = Meta(format=FORMAT, posttune=__version__, step=step, **asdict(_describe(main, path)))
    try:
        with atomic_dir(path, replace=True) as temporary:
            ranks.broadcast_object((str(temporary), ""))
            dcp.write(temporary / TENSORS, tensors, group=ranks.control)
            _write_json(temporary / "meta.json", asdict(meta))
            _write_json(temporary / "state.json", state)
            _write_json(temporary / "optimizer.json", main.settings())
            _write_json(temporary / "run_config.json", config)
            if parts:
                _write_json(temporary / PARTS, {name: _about(part, path) for name, part in parts.items()})
            _write_hf(temporary / HF, model, tokenizer)
            _write_json(temporary / MARKER, _sizes(temporary))
    except (OSError, CheckpointError) as error:
        ranks.broadcast_object(("", str(error)))
        raise _not_written(path, error) from error
    ranks.broadcast_object(("", ""))
    return path


def _write_part(tensors: Mapping[str, torch.Tensor], ranks: Ranks, path: Path) -> None:
    """The part of a rank above 0, which hears from rank 0 where to write, and then how it went."""
    temporary, failure = ranks.broadcast_object(("", ""))
    if temporary:
        with suppress(CheckpointError):  # every rank failed then, and rank 0 says so
            dcp.write(Path(temporary) / TENSORS, tensors, group=ranks.control)
        _, failure = ranks.broadcast_object(("", ""))
    if failure:
        raise _not_written(path, failure)


def _not_written(path: Path, cause: object) -> CheckpointError:
    return CheckpointError(
        f"could not be written: {cause}",
        who=str(path),
        fix="see whether the disk is full or the folder is writable",
    )


def _about(part: Part, path: Path) -> dict[str, Any]:
    return {"described": asdict(_describe(part, path)), "optimizer": part.settings()}


def _describe(part: Part, path: Path) -> Described:
    where = None
    if part.base is not None and part.adapters_only:
        base = part.base.resolve()
        where = {
            "path": str(base),
            "relative": os.path.relpath(base, path.resolve()),
            "fingerprint": fingerprint(base),
        }
    dtype = str(inner_model(part.model).dtype).removeprefix("torch.")
    return Described(dtype, describe(part.model), where)


def fingerprint(folder: Path) -> str:
    """Tells the weights of one folder from another's: names, sizes, and both ends of each weight file."""
    digest = hashlib.sha256()
    files = [*folder.glob("*"), *(folder / TENSORS).glob("*")]
    for file in sorted(path for path in files if path.suffix in {".safetensors", ".bin", ".distcp"}):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder)}:{size}\n".encode())
        with file.open("rb") as handle:
            digest.update(handle.read(_PROBE))
            handle.seek(max(0, size - _PROBE))
            digest.update(handle.read(_PROBE))
    return digest.hexdigest()


def _write_hf(folder: Path, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    folder.mkdir()
    inner = inner_model(model)
    inner.config.save_pretrained(folder)
    if inner.generation_config is not None:
        inner.generation_config.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def _write_json(path: Path, data: Any) -> None:
    text = json.dumps(data, ensure_ascii=False)
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def is_checkpoint(path: Path) -> bool:
    """Whether the folder is, or was meant to be, a checkpoint of this program."""
    return (path / "meta.json").is_file() and ((path / MARKER).is_file() or (path / TENSORS).is_dir())


def what_is_missing(path: Path) -> str | None:
    """Why the checkpoint is not whole, or None when it is."""
    try:
        sizes: dict[str, int] = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "it was never completed"
    except (OSError, ValueError) as error:
        return f"its marker {MARKER} cannot be read: {error}"
    for name, size in sizes.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    return None


def latest(folder: Path) -> Path | None:
    """The whole checkpoint with the highest step in ``folder``; None where there is none.

    A newer one that is not whole is passed over, and said to be.
    """
    for path in _newest_first(folder):
        fault = what_is_missing(path)
        if fault is None:
            return path
        log.warning("%s is passed over: %s", path, fault)
    return None


def _newest_first(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError("is not named global_step_<N>", who=str(path), fix="give a checkpoint's folder")
    return int(match.group(1))


def prune(folder: Path, keep_last: int, keep: Collection[int] = ()) -> list[Path]:
    """Remove all but the newest ``keep_last`` whole checkpoints, and remains older than these.

    The steps in ``keep`` stay too.
    """
    whole = [path for path in _newest_first(folder) if what_is_missing(path) is None]
    if len(whole) < keep_last:
        return []
    oldest_kept = step_of(whole[keep_last - 1])
    older = [path for path in _newest_first(folder) if step_of(path) < oldest_kept]
    gone = [path for path in older if step_of(path) not in keep]
    for path in gone:
        (path / MARKER).unlink(missing_ok=True)  # first: half removed is never taken for whole
        shutil.rmtree(path)
    return gone


def read_meta(path: Path) -> Meta:
    """What a whole checkpoint says of itself. Raises `CheckpointError`."""
    missing = what_is_missing(path)
    if missing:
        raise CheckpointError(f"is not whole: {missing}", who=str(path), fix="use an earlier checkpoint")
    found = _read_json(path, "meta.json")
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        version = found.get("format") if isinstance(found, dict) else None
        raise CheckpointError(
            f"has format {version!r}; this version reads format {FORMAT}",
            who=str(path),
            fix="use the version of posttune that wrote it",
        )
    try:
        return Meta(**found)
    except TypeError as error:
        raise _damaged(path, f"meta.json is unusable: {error}") from error


def find_base(path: Path, meta: Described) -> Path | None:
    """Where the model lies that the adapters belong to; None where all weights are in the checkpoint.

    Raises `CheckpointError` where it is gone or has other weights than when the checkpoint was written.
    """
    if meta.base is None:
        return None
    places = (Path(meta.base["path"]), path.resolve() / meta.base["relative"])
    base = next((place.resolve() for place in places if place.is_dir()), None)
    if base is None:
        raise CheckpointError(
            f"its base model {places[0]} is gone", who=str(path), fix="put it back, or export with --base DIR"
        )
    if fingerprint(base) != meta.base["fingerprint"]:
        raise CheckpointError(
            f"its base model {base} has other weights now",
            who=str(path),
            fix="put back the one that was trained on",
        )
    return base


def _read_json(path: Path, name: str) -> Any:
    try:
        return json.loads((path / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, f"{name} cannot be read: {error}") from error


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(what, who=str(path), fix="use another checkpoint")


def read_state(path: Path) -> dict[str, Any]:
    """The trainer's state of a whole checkpoint, without its tensors."""
    read_meta(path)
    state: dict[str, Any] = _read_json(path, "state.json")
    return state


def load(
    path: Path,
    *,
    model: nn.Module,
    optimizer: Optimizer | None,
    ranks: Ranks | None = None,
    restore_rng: bool = True,
    parts: Mapping[str, Part] | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into models, optimisers and random generators; return the trainer's state.

    ``parts`` must be those that were saved. A rank that the checkpoint has no generators of keeps its
    own. Raises `CheckpointError` naming what differs before anything has changed.
    """
    folder, rank = path / TENSORS, (ranks or Ranks()).rank
    described = _read_described(path)
    stored = dcp.shapes(folder)
    fillings = _fillings(path, {MAIN: Part(model, optimizer), **(parts or {})}, described, stored)
    wanted = {key: value for filling in fillings for key, value in filling.tensors.items()}
    generators = _empty_generators(stored, rank) if restore_rng else {}
    dcp.read_into(folder, {**wanted, **generators})
    for filling in fillings:
        filling.finish()
    if generators:
        rng.restore({name.rpartition("/")[2]: value for name, value in generators.items()})
    return read_state(path)


def _fillings(
    path: Path,
    parts: Mapping[str, Part],
    described: Mapping[str, tuple[Described, Any]],
    stored: training_state.Shapes,
) -> list[Filling]:
    who = f"checkpoint {path}"
    check_names(who, described, parts)
    made = []
    for name, part in parts.items():
        about, settings = described[name]
        find_base(path, about)
        made.append(prepare_filling(f"{who}, {name}" if name else who, name, part, about, settings, stored))
    return made


def _read_described(path: Path) -> dict[str, tuple[Described, Any]]:
    """What a checkpoint says of each model, and the settings of its optimiser, by the part's name."""
    main = (read_meta(path), _read_json(path, "optimizer.json"))
    others = _read_json(path, PARTS) if (path / PARTS).is_file() else {}
    try:
        more = {name: (Described(**about["described"]), about["optimizer"]) for name, about in others.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise _damaged(path, f"{PARTS} is unusable: {error}") from error
    return {MAIN: main, **more}


def load_weights(path: Path, model: nn.Module) -> None:
    """Load the weights of the main model alone, cast to its type. Raises `CheckpointError`."""
    meta = read_meta(path)
    stored = dcp.shapes(path / TENSORS)
    dcp.read_into(path / TENSORS, weights_to_fill(f"checkpoint {path}", meta, model, stored, types=False))


def _empty_generators(stored: training_state.Shapes, rank: int) -> dict[str, torch.Tensor]:
    prefix = f"rng/{rank}/"
    return {
        name: torch.zeros(shape, dtype=dtype)
        for name, (shape, dtype) in stored.items()
        if name.startswith(prefix)
    }
