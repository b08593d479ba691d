"""Folders of verl: one ``model_world_size_N_rank_R.pt`` a process, whose tensors are put together again.

The files are read by ``torch.load(weights_only=True)``, which executes nothing; torch itself names the
classes of DTensor that it then allows. Optimiser and extra files are left alone.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
import torch.distributed.tensor  # its classes may now be read
from torch.distributed.tensor.placement_types import _StridedShard
from torch.serialization import safe_globals
from transformers import PretrainedConfig, PreTrainedModel

from posttune.checkpoint.shards import assemble
from posttune.checkpoint.sources import OnDisk, open_source
from posttune.config.models import LoraConfig
from posttune.errors import CheckpointError, ModelError
from posttune.models.hf_folder import CAUSAL, SEQUENCE, TOKEN, model_of, read_config
from posttune.models.lora import apply_lora

_NAME = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_PARTS = ("actor", "critic")
_WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.")
_PEFT, _WRAPPED = "base_model.model.", ".base_layer."
_ADAPTER = re.compile(r"(?P<layer>.*)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight")
_AGAIN = "copy the folder again, with every file of it"


def shard_files(folder: Path) -> dict[int, dict[int, Path]]:
    """The files of weights by rank, by world size."""
    found: dict[int, dict[int, Path]] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match:
            found.setdefault(int(match[1]), {})[int(match[2])] = path
    return found


def find_folder(path: Path, part: str | None = None) -> Path | None:
    """The folder of shards that ``path`` is or holds (of the actor, or of ``part``); None where none is.

    ``path`` may also be verl's ``global_step_N``, or the folder of these, of which the last is taken.
    """
    steps = [entry for entry in path.glob("global_step_*") if entry.name[12:].isdigit()]
    last = sorted(steps, key=lambda entry: int(entry.name[12:]), reverse=True)
    for place in (path, *last):
        inner = [place / (part or _PARTS[0])]
        for folder in [place, *inner] if part is None else inner:
            if shard_files(folder):
                return folder
    return None


class VerlFolder(OnDisk):
    """What verl left of an actor or a critic. ``base`` gives what the folder lacks: config, tokenizer."""

    kind = "verl"

    def __init__(self, path: Path, *, base: Path | None = None) -> None:
        self.path = path.resolve()
        self.who = f"verl checkpoint {self.path}"
        self._paths = self._all_ranks()
        own = next((place for place in (path / "huggingface", path) if _has_config(place)), None)
        self.base = None if base is None else open_source(base).path
        if own is None and base is None:
            what = "has no huggingface/config.json, so the architecture is unknown"
            raise ModelError(what, who=self.who, fix="name the model that was trained by --base DIR")
        self.files = own if own is not None else open_source(cast(Path, base)).files
        self._tokenizer = self.files if base is None or own is None else self._with_tokenizer(base)

    def _with_tokenizer(self, base: Path) -> Path:
        from posttune.models.tokenizer import has_tokenizer

        return self.files if has_tokenizer(self.files) else open_source(base).tokenizer_dir

    @property
    def tokenizer_dir(self) -> Path:
        return self._tokenizer

    def _all_ranks(self) -> dict[int, Path]:
        worlds = shard_files(self.path)
        if len(worlds) != 1:
            what = f"holds shards of several world sizes: {', '.join(map(str, sorted(worlds)))}"
            raise CheckpointError(what, who=self.who, fix="leave those of one in it")
        world, paths = next(iter(worlds.items()))
        missing = sorted(set(range(world)) - set(paths))
        if missing:
            first = f"model_world_size_{world}_rank_{missing[0]}.pt"
            what = f"{len(missing)} of its {world} ranks are missing, the first is {first}"
            raise CheckpointError(what, who=self.who, fix=_AGAIN)
        return paths

    @cached_property
    def _shards(self) -> dict[int, dict[str, torch.Tensor]]:
        return {rank: _read(path) for rank, path in sorted(self._paths.items())}

    @cached_property
    def _names(self) -> list[str]:
        """The tensors' names, which every rank must have."""
        first = self._shards[0]
        for rank, shard in self._shards.items():
            other = sorted(first.keys() ^ shard.keys())
            if other:
                what = f"rank 0 and rank {rank} hold other tensors: {other[0]} is on one of them alone"
                raise CheckpointError(what, who=self.who, fix="it is of no FSDP run, or damaged")
        return list(first)

    @cached_property
    def _adapters(self) -> dict[str, Any] | None:
        """Rank, scale and targets of the adapters; None without any."""
        found = [match for name in self._names if (match := _ADAPTER.fullmatch(name))]
        layers = sorted({_plain(match["layer"]) for match in found})
        if not layers:
            return None
        alpha = _alpha_of(self.path)
        if not alpha:
            raise CheckpointError(
                f"holds adapters, and says nowhere with which alpha (found {alpha!r}): without it their "
                "scale is unknown",
                who=self.who,
                fix='put {"lora_alpha": N} into lora_train_meta.json beside the shards',
            )
        rows = next(self._shards[0][match.string].shape[0] for match in found if match["side"] == "A")
        return {"rank": int(rows), "alpha": float(alpha), "targets": layers}

    @property
    def lora(self) -> bool:
        return self._adapters is not None

    @property
    def config(self) -> PretrainedConfig:
        """The folder's, with the head that the weights have."""
        config = read_config(self.files)
        head = self._head()
        name = next(iter(config.architectures or ()), "")
        if not name.endswith(head):
            stem = re.sub(r"For[A-Za-z]+$", "", name) or type(config).__name__.removesuffix("Config")
            config.architectures = [stem + head]
        if head != CAUSAL:
            config.num_labels = 1
        return config

    def _head(self) -> str:
        names = {_plain(name) for name in self._names}
        if "score.weight" not in names:
            return CAUSAL
        return TOKEN if "score.bias" in names else SEQUENCE

    @property
    def dtype(self) -> torch.dtype:
        sizes: dict[torch.dtype, int] = {}
        for tensor in self._shards[0].values():
            if tensor.is_floating_point():
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
        return max(sizes, key=lambda dtype: sizes[dtype])

    @property
    def origin(self) -> str:
        return f", put together from {len(self._paths)} shards of verl"

    def size(self) -> int:
        return sum(tensor.numel() for tensor in self._shards[0].values())

    def _whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor as it was before it was cut."""
        for name in self._names:
            yield name, assemble(self.who, name, {rank: shard[name] for rank, shard in self._shards.items()})

    def load_model(
        self, *, dtype: torch.dtype | None = None, attention: str | None = None
    ) -> PreTrainedModel:
        weights, adapters = {}, {}
        for name, tensor in self._whole():
            if _ADAPTER.fullmatch(name):
                adapters[name] = tensor
            else:
                weights[_plain(name)] = tensor
        config = self.config
        weights = self._one_of_tied(config, self._without_padding(config, weights))
        model = model_of(
            weights,
            config,
            dtype=dtype or self.dtype,
            attention=attention,
            generation=self.generation_config,
            who=self.who,
        )
        return self._adapted(model, adapters) if adapters else model

    def _without_padding(
        self, config: PretrainedConfig, weights: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        rows = config.get_text_config().vocab_size
        long = {name for name in weights if name.endswith(("embed_tokens.weight", "lm_head.weight"))}
        if any(weights[name].shape[0] > rows for name in long) and len(self.tokenizer) > rows:
            what = f"the tokenizer has {len(self.tokenizer)} tokens, config.json says vocab_size {rows}"
            raise ModelError(what, who=self.who, fix="give the config.json of this model by --base DIR")
        return {name: tensor[:rows] if name in long else tensor for name, tensor in weights.items()}

    def _one_of_tied(
        self, config: PretrainedConfig, weights: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        embedding = next((name for name in weights if name.endswith("embed_tokens.weight")), None)
        if not config.get_text_config().tie_word_embeddings or embedding is None:
            return weights
        head = weights.pop("lm_head.weight", None)
        if head is not None and not torch.equal(head, weights[embedding]):
            what = "tie_word_embeddings is True, but lm_head.weight is not the input embedding"
            fix = 'set "tie_word_embeddings": false in its config.json if the weights are right'
            raise ModelError(what, who=self.who, fix=fix)
        return weights

    def _adapted(self, model: PreTrainedModel, adapters: Mapping[str, torch.Tensor]) -> PreTrainedModel:
        described = cast("dict[str, Any]", self._adapters)
        config = LoraConfig(
            rank=described["rank"], alpha=described["alpha"], target_modules=described["targets"]
        )
        made = cast(PreTrainedModel, apply_lora(model, config, seed=0))
        wanted = {name: each for name, each in made.named_parameters() if ".lora_" in name}
        given = {}
        for name, tensor in adapters.items():
            match = cast("re.Match[str]", _ADAPTER.fullmatch(name))
            given[f"{_PEFT}{_plain(match['layer'])}.lora_{match['side']}.default.weight"] = tensor
        other = sorted(wanted.keys() ^ given.keys())
        if other:
            raise CheckpointError(f"its adapters have no {other[0]}", who=self.who, fix=_AGAIN)
        with torch.no_grad():
            for name, parameter in wanted.items():
                parameter.copy_(given[name])
        made.eval()
        return made


def _has_config(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _plain(name: str) -> str:
    """A parameter's name in the transformers model, without what wraps it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix(_PEFT).replace(_WRAPPED, ".")


def _alpha_of(folder: Path) -> float | None:
    for place in ("lora_train_meta.json", "lora_adapter/adapter_config.json"):
        path = folder / place
        if path.is_file():
            try:
                alpha = json.loads(path.read_text(encoding="utf-8")).get("lora_alpha")
            except (ValueError, AttributeError) as error:
                raise CheckpointError(f"cannot be read: {error}", who=str(path), fix=_AGAIN) from error
            if alpha:
                return float(alpha)
    return None


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        with _quiet(), safe_globals([_StridedShard]):  # torch 2.11 names only the plain one
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        what = f"is refused: {str(error).partition(chr(10))[0]}"
        fix = "it holds more than tensors, and may not be trusted; take another checkpoint"
        raise CheckpointError(what, who=str(path), fix=fix) from error
    except (RuntimeError, OSError, ValueError, EOFError, KeyError, AttributeError, TypeError) as error:
        what = f"cannot be read: {str(error).partition(chr(10))[0]}"
        raise CheckpointError(what, who=str(path), fix=_AGAIN) from error
    if not isinstance(found, dict) or not found:
        raise CheckpointError("holds no tensors by name", who=str(path), fix=_AGAIN)
    others = [name for name, value in found.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise CheckpointError(f"{others[0]!r} is no tensor", who=str(path), fix=_AGAIN)
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's notes that a mesh was read and no process group is there."""
    notes = logging.getLogger("torch.distributed.device_mesh")
    disabled, notes.disabled = notes.disabled, True
    try:
        yield
    finally:
        notes.disabled = disabled
