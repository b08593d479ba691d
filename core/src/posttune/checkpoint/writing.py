"""Writing a checkpoint: first what is small, then the tensors, last the marker that says it is whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from posttune._version import __version__
from posttune.checkpoint import dcp, rng
from posttune.checkpoint.layout import (
    FORMAT,
    HF,
    MARKER,
    PARTS,
    TENSORS,
    Meta,
    fingerprint,
    sizes_of,
    write_json,
)
from posttune.checkpoint.parts import MAIN, Described, Part, Tensors, tensors_of
from posttune.checkpoint.space import free_bytes, shortage
from posttune.distributed.ranks import Ranks
from posttune.errors import CheckpointError
from posttune.files import atomic_dir
from posttune.models.lora import describe, inner_model
from posttune.models.tokenizer import save_tokenizer


@dataclass
class Draft:
    """A checkpoint in the making. Every rank has one, and calls `complete` once."""

    path: Path
    tensors: Tensors
    ranks: Ranks
    temporary: Path
    held: ExitStack = field(default_factory=ExitStack)  # on rank 0: what makes the folder appear or vanish

    def complete(self) -> Path:
        """Write the tensors and let the checkpoint appear; its path. Raises `CheckpointError`."""
        if not self.ranks.main:
            with suppress(CheckpointError):  # every rank failed then, and rank 0 says so
                dcp.write(self.temporary / TENSORS, self.tensors, group=self.ranks.control)
            _, failure = self.ranks.broadcast_object(("", ""))
            if failure:
                raise not_written(self.path, failure)
            return self.path
        needed = sum(tensor.nbytes for tensor in self.tensors.values())
        try:
            with self.held:
                dcp.write(self.temporary / TENSORS, self.tensors, group=self.ranks.control)
                write_json(self.temporary / MARKER, sizes_of(self.temporary))
        except (OSError, CheckpointError) as error:
            failed = not_written(self.path, _cause(error), needed)
            self.ranks.broadcast_object(("", failed.what))
            raise failed from error
        self.ranks.broadcast_object(("", ""))
        return self.path


def begin(
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
    copy: bool = False,
    background: Ranks | None = None,
) -> Draft:
    """Take down everything but the tensors of ``folder/global_step_<step>``. Every rank calls it.

    ``state`` and ``config`` (the resolved run) are JSON data. ``base``: the folder whose weights the adapters
    belong to; without it all weights are kept. ``parts``: models beside the main one by name, each with its
    optimiser. ``copy``: of the tensors, in the host's memory, so that training may go on before the draft is
    completed; ``background``: the ranks with a process group of its own for that. A checkpoint of that
    step gives way. Raises `CheckpointError`, and then leaves no trace.
    """
    ranks = ranks or Ranks()
    path = folder / f"global_step_{step}"
    every = {MAIN: Part(model, optimizer, base), **(parts or {})}
    tensors = tensors_of(every)
    tensors |= {f"rng/{ranks.rank}/{name}": value for name, value in rng.capture().items()}
    held, temporary = ExitStack(), ""
    if ranks.main:
        try:
            _refuse_full(path, tensors)
            with ExitStack() as entered:
                temporary = str(entered.enter_context(atomic_dir(path, replace=True)))
                meta = Meta(
                    format=FORMAT, posttune=__version__, step=step, **asdict(_describe(every[MAIN], path))
                )
                _write_small(Path(temporary), path, every, asdict(meta), state, config, tokenizer)
                held = entered.pop_all()
        except (OSError, CheckpointError) as error:
            failed = not_written(path, _cause(error), sum(tensor.nbytes for tensor in tensors.values()))
            ranks.broadcast_object(("", failed.what))
            raise failed from error
    temporary, failure = ranks.broadcast_object((temporary, ""))
    if failure:
        raise not_written(path, failure)
    if copy:
        with held as entered:  # where the host's memory has no room, the folder vanishes
            tensors = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
            held = entered.pop_all()
    return Draft(path, tensors, background or ranks, Path(temporary), held)


def _write_small(
    temporary: Path,
    path: Path,
    every: Mapping[str, Part],
    meta: Mapping[str, Any],
    state: Mapping[str, Any],
    config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """All files but the tensors and the marker."""
    others = {name: part for name, part in every.items() if name != MAIN}
    write_json(temporary / "meta.json", meta)
    write_json(temporary / "state.json", state)
    write_json(temporary / "optimizer.json", every[MAIN].settings())
    write_json(temporary / "run_config.json", config)
    if others:
        about = {
            name: {"described": asdict(_describe(part, path)), "optimizer": part.settings()}
            for name, part in others.items()
        }
        write_json(temporary / PARTS, about)
    for name, part in every.items():
        _write_config(temporary / (f"{HF}-{name}" if name else HF), part.model)
    save_tokenizer(tokenizer, temporary / HF)


def _write_config(folder: Path, model: nn.Module) -> None:
    folder.mkdir()
    inner = inner_model(model)
    inner.config.save_pretrained(folder)
    if inner.generation_config is not None:
        inner.generation_config.save_pretrained(folder)


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


def _refuse_full(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `CheckpointError` where the disk cannot hold the tensors, before anything is written."""
    what = shortage(path, sum(tensor.nbytes for tensor in tensors.values()))
    if what:
        raise CheckpointError(what, who=str(path))


def not_written(path: Path, cause: str, needed: int = 0) -> CheckpointError:
    """What is raised for a checkpoint that could not be written."""
    about = ""
    if needed and "bytes" not in cause:
        about = f" (its tensors take {needed:,} bytes, {free_bytes(path):,} are free now)"
    return CheckpointError(
        f"could not be written: {cause}{about}",
        who=str(path),
        fix="make room or make the folder writable, then --resume; earlier checkpoints are as they were",
    )


def _cause(error: OSError | CheckpointError) -> str:
    if isinstance(error, CheckpointError):
        return error.what
    return error.strerror or str(error)
