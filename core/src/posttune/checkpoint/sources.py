"""Where a model comes from: a Hugging Face folder, a checkpoint, a run, or the trainer's own module.

Folders of PEFT and of verl have modules of their own.

A path is recognised by what it holds, never by its name.
"""

from __future__ import annotations

import copy
import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from posttune.checkpoint import store
from posttune.checkpoint.card import RunPlace, checkpoint_place, model_place
from posttune.checkpoint.parts import MAIN
from posttune.errors import ModelError
from posttune.models.heads import add_head
from posttune.models.hf_folder import (
    auto_class,
    check_folder,
    check_ties,
    is_classifier,
    read_config,
    read_model,
)
from posttune.models.lora import apply_lora, from_description, inner_model, is_lora, merge
from posttune.models.params import cast_parameters, count_parameters, named_hf_tensors
from posttune.models.tokenizer import TOKENIZER_FILES, load_tokenizer, save_tokenizer

logger = logging.getLogger(__name__)


class ModelSource(ABC):
    """A model that can be exported or trained further."""

    kind: Literal["hf", "checkpoint", "live", "peft", "verl"]
    path: Path | None  # None for the trainer's own module
    base: Path | None = None  # the folder whose weights its adapters belong to
    place: RunPlace | None = None  # where in a run it was trained, if that is known
    part: str = MAIN  # which of a checkpoint's models it is

    @property
    @abstractmethod
    def config(self) -> PretrainedConfig:
        """Its transformers configuration."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of its weights as they are stored (or trained)."""

    @property
    @abstractmethod
    def generation_config(self) -> GenerationConfig | None:
        """How it wants to be sampled, and what ends its answers."""

    @property
    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer."""

    @abstractmethod
    def load_model(
        self, *, dtype: torch.dtype | None = None, attention: str | None = None
    ) -> PreTrainedModel:
        """The model as it was trained, adapters beside the weights; in its own type where none is given."""

    def load_merged(
        self, *, dtype: torch.dtype | None = None, attention: str | None = None
    ) -> PreTrainedModel:
        """A plain transformers model: adapters are added to the weights."""
        return merge(self.load_model(dtype=dtype, attention=attention))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight once under its Hugging Face name, tied ones under the first.

        Where adapters were added the tensor is float32, as it was computed.
        """
        yield from named_hf_tensors(self.load_model(), exact=True)

    @property
    def lora(self) -> bool:
        """Whether it is adapters on another model."""
        return False

    def size(self) -> int:
        """How many elements its weights have, about; 0 where that is unknown. Reads no weights."""
        return 0

    @property
    def name(self) -> str:
        """What the model is called."""
        return self.path.name if self.path else "model"

    @property
    def origin(self) -> str:
        """How it came to be, as the end of a sentence; empty where nothing is known."""
        return ""

    @abstractmethod
    def write_companions(self, folder: Path) -> None:
        """Put the tokenizer's files, chat template and generation configuration into a folder."""


class OnDisk(ModelSource):
    """What the kinds of folder have in common: Hugging Face files beside or under the weights."""

    files: Path  # where config.json and the tokenizer are
    path: Path

    @property
    def config(self) -> PretrainedConfig:
        return read_config(self.files)

    @property
    def generation_config(self) -> GenerationConfig | None:
        if not (self.files / "generation_config.json").is_file():
            return None
        return GenerationConfig.from_pretrained(self.files, local_files_only=True)

    @property
    def tokenizer_dir(self) -> Path:
        """The folder of its tokenizer."""
        return self.files

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.tokenizer_dir)

    def write_companions(self, folder: Path) -> None:
        load_tokenizer(self.tokenizer_dir)  # refuses what cannot be read
        for name in TOKENIZER_FILES:
            _copy(self.tokenizer_dir / name, folder)
        _copy(self.files / "generation_config.json", folder)


def _copy(path: Path, folder: Path) -> None:
    if path.is_file():
        shutil.copyfile(path, folder / path.name)


class HFFolder(OnDisk):
    """A Hugging Face folder."""

    kind = "hf"

    def __init__(self, path: Path) -> None:
        check_folder(path)
        self.path = self.files = path.resolve()
        self.place = model_place(self.path)

    @property
    def dtype(self) -> torch.dtype:
        said = getattr(self.config, "dtype", None)
        return said if isinstance(said, torch.dtype) else torch.float32

    def size(self) -> int:
        files = [path for path in self.path.iterdir() if path.suffix in (".safetensors", ".bin")]
        return sum(path.stat().st_size for path in files) // self.dtype.itemsize

    def load_model(
        self, *, dtype: torch.dtype | None = None, attention: str | None = None
    ) -> PreTrainedModel:
        return read_model(self.path, dtype=dtype or "auto", attention=attention)


class CheckpointFolder(OnDisk):
    """A checkpoint of this program. ``base`` overrides where its adapters' model lies.

    ``part``: a model beside the main one, such as the critic.
    """

    kind = "checkpoint"

    def __init__(self, path: Path, *, base: Path | None = None, part: str | None = None) -> None:
        self.path = path.resolve()
        self.part = part or MAIN
        self.step = store.read_meta(self.path).step
        self.meta = store.described(self.path, self.part)
        self.files = store.hf_files(self.path, self.part)
        self.base = self._find_base(base)
        self.place = checkpoint_place(self.path)

    def _find_base(self, given: Path | None) -> Path | None:
        if given is None:
            return store.find_base(self.path, self.meta)
        if self.meta.base is None:
            fix = "leave the base out"
            raise ModelError("holds all weights: it needs no base", who=str(self.path), fix=fix)
        if store.fingerprint(open_source(given).path) != self.meta.base["fingerprint"]:
            logger.warning("the files of %s are not those that %s was trained on", given, self.path)
        return given

    @property
    def tokenizer_dir(self) -> Path:
        return self.path / store.HF

    @property
    def lora(self) -> bool:
        return self.meta.lora is not None

    def size(self) -> int:
        own = store.count_weights(self.path, self.part)
        return own if self.base is None else open_source(self.base).size() + own

    @property
    def dtype(self) -> torch.dtype:
        return cast(torch.dtype, getattr(torch, self.meta.dtype))

    @property
    def name(self) -> str:
        run = self.path.parent
        name = (run.parent if run.name == "checkpoints" else self.path).name
        return f"{name}-{self.part}" if self.part else name

    @property
    def origin(self) -> str:
        base = f" of {self.base.name}, merged" if self.base else ""
        return f", after step {self.step}{' of LoRA' if self.meta.lora else ''}{base}"

    def load_model(
        self, *, dtype: torch.dtype | None = None, attention: str | None = None
    ) -> PreTrainedModel:
        dtype = dtype or self.dtype
        model = self._without_weights(dtype, attention) if self.base is None else self._base(dtype, attention)
        if self.meta.lora is not None:
            description = from_description(self.meta.lora, who=f"checkpoint {self.path}")
            model = cast(PreTrainedModel, apply_lora(model, description, seed=0))
        store.load_weights(self.path, model, self.part)
        model.eval()
        return model

    def _without_weights(self, dtype: torch.dtype, attention: str | None) -> PreTrainedModel:
        with no_init_weights():
            config = self.config
            made = auto_class(config).from_config(config, dtype=dtype, attn_implementation=attention)
        model = cast(PreTrainedModel, made)
        model.tie_weights()
        cast(Any, model).generation_config = self.generation_config
        return model

    def _base(self, dtype: torch.dtype, attention: str | None) -> PreTrainedModel:
        """The model that the adapters belong to, with a scalar head where the checkpoint has one."""
        assert self.base is not None
        # In the type of the training first: the adapters were learnt on weights rounded to it.
        model = open_source(self.base).load_merged(dtype=self.dtype, attention=attention)
        config = self.config
        if is_classifier(config):
            if not is_classifier(model.config):
                model = add_head(model, who=f"model {self.base}", seed=0)
            model.config.pad_token_id = config.pad_token_id
        cast_parameters(model, dtype)
        return model


class LiveModel(ModelSource):
    """The module that a trainer holds. It is read, never changed."""

    kind = "live"
    path = None

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str = "model",
        origin: str = "",
        base: Path | None = None,
        place: RunPlace | None = None,
    ) -> None:
        check_ties(inner_model(model), who="model")
        self.base, self.place = base, place
        self._model = model
        self._tokenizer = tokenizer
        self._name = name
        self._origin = origin

    @property
    def name(self) -> str:
        return self._name

    @property
    def origin(self) -> str:
        return self._origin

    @property
    def lora(self) -> bool:
        return is_lora(self._model)

    def size(self) -> int:
        return count_parameters(inner_model(self._model))

    @property
    def config(self) -> PretrainedConfig:
        return inner_model(self._model).config

    @property
    def dtype(self) -> torch.dtype:
        return inner_model(self._model).dtype

    @property
    def generation_config(self) -> GenerationConfig | None:
        return inner_model(self._model).generation_config

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    def load_model(self, **_: object) -> PreTrainedModel:
        """The module itself, in its own type."""
        return self._model

    def load_merged(self, **_: object) -> PreTrainedModel:
        """A copy, in the module's own type."""
        return merge(copy.deepcopy(self._model))

    def write_companions(self, folder: Path) -> None:
        save_tokenizer(self._tokenizer, folder)
        if self.generation_config is not None:
            self.generation_config.save_pretrained(folder)


def open_source(path: str | Path, *, base: Path | None = None, part: str | None = None) -> OnDisk:
    """Recognise a folder by what it holds.

    A Hugging Face folder, a checkpoint, a run folder (its last whole checkpoint), a PEFT folder, or
    verl's shards. ``base``: the model of adapters, where it has moved or is not named; for verl where
    the configuration is, if it is missing. ``part``: a model beside the main one, such as ``critic``.
    Raises `ModelError`, and `CheckpointError` for a checkpoint that is not whole.
    """
    path = Path(path)
    found = _recognise(path, base, part)
    if found is None:
        check_folder(path)
        raise ModelError("holds no model", who=str(path), fix=f"give {_KNOWN}")
    if part is not None and not isinstance(found, CheckpointFolder) and found.kind != "verl":
        what = f"is a {_KINDS[found.kind]}, which has no part {part!r}"
        raise ModelError(what, who=str(path), fix="leave the part out, or give a checkpoint or a run")
    if base is not None and isinstance(found, HFFolder):
        raise ModelError("is a whole model: it needs no base", who=str(path), fix="leave the base out")
    return found


_KINDS = {"hf": "Hugging Face folder", "peft": "PEFT folder"}
_KNOWN = "a Hugging Face folder, a checkpoint, a run folder, a PEFT folder or verl's shards"


def _recognise(path: Path, base: Path | None, part: str | None) -> OnDisk | None:
    from posttune.checkpoint.peft_folder import PeftFolder, is_peft
    from posttune.checkpoint.verl import VerlFolder, find_folder

    if is_peft(path):
        return PeftFolder(path, base=base)
    if find_folder(path) != path and (path / "config.json").is_file():
        return HFFolder(path)
    if store.is_checkpoint(path):
        return CheckpointFolder(path, base=base, part=part)
    shards = find_folder(path, part)
    if shards is not None:
        return VerlFolder(shards, base=base)
    for folder in (path / "checkpoints", path):
        last = store.latest(folder)
        if last is not None:
            return CheckpointFolder(last, base=base, part=part)
    return None
