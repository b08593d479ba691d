"""Where a model comes from: a Hugging Face folder, a checkpoint, a run, or the trainer's own module.

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
from posttune.models.lora import apply_lora, from_description, inner_model, merge
from posttune.models.params import cast_parameters, named_hf_tensors
from posttune.models.tokenizer import TOKENIZER_FILES, load_tokenizer, save_tokenizer

logger = logging.getLogger(__name__)


class ModelSource(ABC):
    """A model that can be exported or trained further."""

    kind: Literal["hf", "checkpoint", "live"]
    path: Path | None  # None for the trainer's own module

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


class _OnDisk(ModelSource):
    """What the two kinds of folder have in common: Hugging Face files beside or under the weights."""

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
        return load_tokenizer(self.files)

    def write_companions(self, folder: Path) -> None:
        load_tokenizer(self.files)  # refuses what cannot be read
        for name in (*TOKENIZER_FILES, "generation_config.json"):
            if (self.files / name).is_file():
                shutil.copyfile(self.files / name, folder / name)


class HFFolder(_OnDisk):
    """A Hugging Face folder."""

    kind = "hf"

    def __init__(self, path: Path) -> None:
        check_folder(path)
        self.path = self.files = path.resolve()

    @property
    def dtype(self) -> torch.dtype:
        said = getattr(self.config, "dtype", None)
        return said if isinstance(said, torch.dtype) else torch.float32

    def load_model(
        self, *, dtype: torch.dtype | None = None, attention: str | None = None
    ) -> PreTrainedModel:
        return read_model(self.path, dtype=dtype or "auto", attention=attention)


class CheckpointFolder(_OnDisk):
    """A checkpoint of this program. ``base`` overrides where its adapters' model lies."""

    kind = "checkpoint"

    def __init__(self, path: Path, *, base: Path | None = None) -> None:
        self.path = path.resolve()
        self.files = self.path / store.HF
        self.meta = store.read_meta(self.path)
        self.base = self._find_base(base)

    def _find_base(self, given: Path | None) -> Path | None:
        if given is None or self.meta.base is None:
            return store.find_base(self.path, self.meta)
        if store.fingerprint(open_source(given).path) != self.meta.base["fingerprint"]:
            logger.warning("the files of %s are not those that %s was trained on", given, self.path)
        return given

    @property
    def dtype(self) -> torch.dtype:
        return cast(torch.dtype, getattr(torch, self.meta.dtype))

    @property
    def name(self) -> str:
        run = self.path.parent
        return (run.parent if run.name == "checkpoints" else self.path).name

    @property
    def origin(self) -> str:
        base = f" of {self.base.name}, merged" if self.base else ""
        return f", after step {self.meta.step}{' of LoRA' if self.meta.lora else ''}{base}"

    def load_model(
        self, *, dtype: torch.dtype | None = None, attention: str | None = None
    ) -> PreTrainedModel:
        dtype = dtype or self.dtype
        model = self._without_weights(dtype, attention) if self.base is None else self._base(dtype, attention)
        if self.meta.lora is not None:
            description = from_description(self.meta.lora, who=f"checkpoint {self.path}")
            model = cast(PreTrainedModel, apply_lora(model, description, seed=0))
        store.load_weights(self.path, model)
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
    ) -> None:
        check_ties(inner_model(model), who="model")
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


def open_source(path: str | Path, *, base: Path | None = None) -> HFFolder | CheckpointFolder:
    """Recognise a Hugging Face folder, a checkpoint, or a run folder (its last whole checkpoint).

    ``base``: the model of a checkpoint's adapters, where it has moved.
    Raises `ModelError`, and `CheckpointError` for a checkpoint that is not whole.
    """
    path = Path(path)
    if (path / "config.json").is_file():
        return HFFolder(path)
    if store.is_checkpoint(path):
        return CheckpointFolder(path, base=base)
    for folder in (path / "checkpoints", path):
        last = store.latest(folder)
        if last is not None:
            return CheckpointFolder(last, base=base)
    check_folder(path)
    raise ModelError(
        "holds no model", who=str(path), fix="give a Hugging Face folder, a checkpoint or a run folder"
    )
