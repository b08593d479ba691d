"""Checkpoints of a training run: folders ``global_step_N`` that are whole or not there.

    tensors/      weights, optimiser state, random generators (torch.distributed.checkpoint)
    hf/           configuration and tokenizer of the model, as Hugging Face files
    hf-critic/    configuration of a model beside the main one
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
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttune.checkpoint.parts import MAIN, Described
from posttune.errors import CheckpointError, UserError
from posttune.files import put_back

log = logging.getLogger("posttune.checkpoint")

FORMAT = 1
MARKER = "COMPLETE"
TENSORS = "tensors"
HF = "hf"
PARTS = "parts.json"
_NAME = re.compile(r"global_step_(\d+)")
_REPLACED = re.compile(r"\.global_step_(\d+)\.old-")
_PROBE = 1 << 20


@dataclass(frozen=True)
class Meta(Described):
    """What a checkpoint says of itself, and of its main model."""

    format: int
    posttune: str
    step: int


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


def write_json(path: Path, data: Any) -> None:
    """Write JSON data to a new file, down to the disk."""
    text = json.dumps(data, ensure_ascii=False)
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sizes_of(folder: Path) -> dict[str, int]:
    """The name and size of every file in a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def is_checkpoint(path: Path) -> bool:
    """Whether the folder is, or was meant to be, a checkpoint of this program."""
    return (path / "meta.json").is_file() and ((path / MARKER).is_file() or (path / TENSORS).is_dir())


def what_is_missing(path: Path) -> str | None:
    """Why the checkpoint is not whole, or None when it is."""
    try:
        sizes: Any = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "it was never completed"
    except (OSError, ValueError) as error:
        return f"its marker {MARKER} cannot be read: {error}"
    if not isinstance(sizes, dict):
        return f"its marker {MARKER} is no list of files"
    for name, size in sizes.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    return None


def latest(folder: Path) -> Path | None:
    """The whole checkpoint with the highest step in ``folder``; None where there is none.

    A newer one that is not whole is passed over, and said to be. One that was giving way to another of
    its step when its process died is put in its place again.
    """
    for number in _giving_way(folder):
        put_back(folder / f"global_step_{number}")
    for path in _newest_first(folder):
        fault = what_is_missing(path)
        if fault is None:
            return path
        log.warning("%s is passed over: %s", path, fault)
    return None


def _giving_way(folder: Path) -> set[str]:
    found = (_REPLACED.match(path.name) for path in folder.glob(".global_step_*.old-*"))
    return {match[1] for match in found if match}


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
    found = read_json(path, "meta.json")
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
        raise damaged(path, f"meta.json is unusable: {error}") from error


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


def read_json(path: Path, name: str) -> Any:
    """A file of a checkpoint. Raises `CheckpointError`."""
    try:
        return json.loads((path / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(path, f"{name} cannot be read: {error}") from error


def damaged(path: Path, what: str) -> CheckpointError:
    """What is raised for a checkpoint that cannot be used."""
    return CheckpointError(what, who=str(path), fix="use another checkpoint")


def read_state(path: Path) -> dict[str, Any]:
    """The trainer's state of a whole checkpoint, without its tensors."""
    read_meta(path)
    state: dict[str, Any] = read_json(path, "state.json")
    return state


def read_described(path: Path) -> dict[str, tuple[Described, Any]]:
    """What a checkpoint says of each model, and the settings of its optimiser, by the part's name."""
    main = (read_meta(path), read_json(path, "optimizer.json"))
    others = read_json(path, PARTS) if (path / PARTS).is_file() else {}
    try:
        more = {name: (Described(**about["described"]), about["optimizer"]) for name, about in others.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise damaged(path, f"{PARTS} is unusable: {error}") from error
    return {MAIN: main, **more}


def described(path: Path, part: str = MAIN) -> Described:
    """What a whole checkpoint says of one of its models. Raises `CheckpointError`, or `UserError`."""
    found = read_described(path)
    if part not in found:
        names = ", ".join(sorted(found.keys() - {MAIN})) or "none"
        what = f"holds no model called {part!r} beside the main one; it holds {names}"
        raise UserError(what, who=str(path), fix="leave the part out, or name one that is there")
    return found[part][0]


def hf_files(path: Path, part: str = MAIN) -> Path:
    """The folder of a model's configuration. Raises `CheckpointError` where the checkpoint has none."""
    folder = path / (f"{HF}-{part}" if part else HF)
    if not folder.is_dir():
        fix = "use the version of posttune that wrote it, or a newer checkpoint"
        raise CheckpointError(f"has no configuration of its {part or 'model'}", who=str(path), fix=fix)
    return folder
