"""Folders of PEFT: LoRA adapters beside the configuration that says how they scale."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig, PreTrainedModel

from posttune.checkpoint.sources import OnDisk, open_source
from posttune.errors import ModelError
from posttune.models.hf_folder import check_ties
from posttune.models.params import cast_parameters, embeddings_tied, named_hf_tensors
from posttune.models.tokenizer import has_tokenizer

if TYPE_CHECKING:
    import peft

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_EMBEDDINGS = ("embed_tokens", "lm_head")


def is_peft(path: Path) -> bool:
    """Whether the folder holds adapters alone."""
    return (path / CONFIG).is_file() and not (path / "config.json").is_file()


class PeftFolder(OnDisk):
    """LoRA adapters. Their model is ``base``, or else the local folder that their configuration names."""

    kind = "peft"

    def __init__(self, path: Path, *, base: Path | None = None) -> None:
        self.path = path.resolve()
        self.who = f"adapter {self.path}"
        self._settings = self._read_settings()
        self._check_weights()
        self._base = open_source(self._find_base(base))
        self.base = self._base.path
        self.files = self._base.files

    def _read_settings(self) -> dict[str, Any]:
        try:
            found = json.loads((self.path / CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{CONFIG} cannot be read: {error}", who=self.who, fix="copy it again"
            ) from error
        if not isinstance(found, dict) or found.get("peft_type") != "LORA":
            kind = found.get("peft_type") if isinstance(found, dict) else None
            what = f"{CONFIG} is of peft_type {kind!r}; adapters of LoRA are read"
            raise ModelError(what, who=self.who, fix="merge it with peft itself, and give the merged folder")
        for key, meaning in (("r", "rank"), ("lora_alpha", "scale")):
            if not isinstance(found.get(key), int | float) or found[key] <= 0:
                what = f"{CONFIG} has no usable {key!r} (found {found.get(key)!r}): the {meaning} is unknown"
                raise ModelError(what, who=self.who, fix="put back the one that was trained with")
        return found

    def _check_weights(self) -> None:
        if not any((self.path / name).is_file() for name in (WEIGHTS, PICKLED)):
            raise ModelError(f"holds no {WEIGHTS}", who=self.who, fix="copy the adapter's weights beside it")

    def _find_base(self, given: Path | None) -> Path:
        if given is not None:
            return given
        named = self._settings.get("base_model_name_or_path")
        places = [Path(named).expanduser(), self.path / named] if isinstance(named, str) and named else []
        found = next((place for place in places if place.is_dir()), None)
        if found is None:
            what = f"belongs to the model {named!r}, which is no folder here"
            raise ModelError(what, who=self.who, fix="name the folder of that model by --base DIR")
        return found

    @property
    def config(self) -> PretrainedConfig:
        return self._base.config

    @property
    def dtype(self) -> torch.dtype:
        return self._base.dtype

    @property
    def tokenizer_dir(self) -> Path:
        return self.path if has_tokenizer(self.path) else self._base.tokenizer_dir

    @property
    def lora(self) -> bool:
        return True

    @property
    def origin(self) -> str:
        return f", LoRA of {self._base.name}, merged"

    def size(self) -> int:
        return self._base.size()

    def load_model(
        self, *, dtype: torch.dtype | None = None, attention: str | None = None
    ) -> PreTrainedModel:
        import peft

        model = self._base.load_merged(dtype=dtype or self.dtype, attention=attention)
        tied = embeddings_tied(model)
        names = set(self._weights)
        if tied and any(f".{name}.lora_" in key for key in names for name in _EMBEDDINGS):
            what = "adapts an embedding that is tied to another weight: it could not be merged"
            fix = "untie the embeddings of the base model, and train again"
            raise ModelError(what, who=self.who, fix=fix)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what is missing is checked below
                made = peft.PeftModel.from_pretrained(model, str(self.path), is_trainable=False)
        except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
            what = f"does not fit {self.base}: {str(error)[:300]}"
            fix = "give the model that it was trained on by --base DIR"
            raise ModelError(what, who=self.who, fix=fix) from error
        self._check_complete(made, names)
        made.eval()
        return cast(PreTrainedModel, made)

    @cached_property
    def _weights(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what the folder holds; a pickled file is read without executing anything."""
        path = self.path / WEIGHTS
        try:
            if path.is_file():
                with safe_open(path, framework="pt") as file:
                    return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            path = self.path / PICKLED
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            what = f"{PICKLED} is refused: {str(error).partition(chr(10))[0]}"
            fix = "it holds more than tensors, and may not be trusted; take another adapter"
            raise ModelError(what, who=self.who, fix=fix) from error
        except (OSError, RuntimeError, ValueError, EOFError, SafetensorError) as error:
            what = f"{path.name} cannot be read: {str(error).partition(chr(10))[0]}"
            raise ModelError(what, who=self.who, fix="copy it again") from error
        return {name: tuple(tensor.shape) for name, tensor in loaded.items()}

    def _check_complete(self, made: peft.PeftModel, names: set[str]) -> None:
        from peft.utils import get_peft_model_state_dict

        wanted = set(get_peft_model_state_dict(made, save_embedding_layers=False))
        for what, left, right in (
            ("lacks {} of the weights that its configuration asks for", wanted, names),
            ("holds {} weights that belong to no module of the base model", names, wanted),
        ):
            other = sorted(left - right)
            if other:
                words = f"{what.format(len(other))}, the first is {other[0]}"
                fix = "copy the adapter again, or give its own model by --base DIR"
                raise ModelError(words, who=self.who, fix=fix)

    def load_merged(
        self, *, dtype: torch.dtype | None = None, attention: str | None = None
    ) -> PreTrainedModel:
        """A plain transformers model: the adapters are added in float32, what was trained whole replaces."""
        made = self.load_model(dtype=torch.float32, attention=attention)
        merged = cast(PreTrainedModel, cast(Any, made).merge_and_unload(safe_merge=True))
        check_ties(merged, who=self.who)
        merged.config = copy.deepcopy(merged.config)
        merged.config.dtype = dtype or self.dtype
        cast_parameters(merged, dtype or self.dtype)
        return merged

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from named_hf_tensors(self.load_merged(dtype=torch.float32))
