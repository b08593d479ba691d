"""Reading and checking Hugging Face model folders. Nothing is fetched, and no code of a folder runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from posttune.errors import ModelError
from posttune.models.attention import attention_name as attention_name
from posttune.models.params import embeddings_tied

_SINGLE = ("model.safetensors", "pytorch_model.bin")
_LISTS = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
CAUSAL, SEQUENCE, TOKEN = "ForCausalLM", "ForSequenceClassification", "ForTokenClassification"
_CLASSES: dict[str, Any] = {
    CAUSAL: AutoModelForCausalLM,
    SEQUENCE: AutoModelForSequenceClassification,
    TOKEN: AutoModelForTokenClassification,
}


def check_folder(path: Path, *, weights: bool = True) -> None:
    """Raise `ModelError` unless the folder holds a configuration and (all of) its weights."""
    who = f"model {path}"
    if not path.exists():
        raise ModelError(
            "no such folder",
            who=who,
            fix="give the path of a local folder; models are not downloaded by name",
        )
    if not path.is_dir():
        raise ModelError(
            "is a file, not a model folder",
            who=who,
            fix="a .gguf file becomes a folder by `posttune models import`",
        )
    if not (path / "config.json").is_file():
        what = "no config.json in it"
        if (path / "adapter_config.json").is_file():
            what = "it holds a LoRA adapter alone, without the model that it belongs to"
        raise ModelError(what, who=who, fix="give a Hugging Face model folder, a checkpoint or a run folder")
    if weights:
        _check_weights(path, who)


def _check_weights(path: Path, who: str) -> None:
    if any((path / name).is_file() for name in _SINGLE):
        return
    for name in _LISTS:
        if (path / name).is_file():
            _check_shards(path, name, who)
            return
    raise ModelError(
        "no weights in it (no model.safetensors)", who=who, fix="copy the weights beside config.json"
    )


def _check_shards(path: Path, name: str, who: str) -> None:
    try:
        shards = set(json.loads((path / name).read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{name} cannot be read: {error}", who=who, fix="copy the folder again") from error
    missing = sorted(shard for shard in shards if not (path / shard).is_file())
    if missing:
        raise ModelError(
            f"{len(missing)} of its {len(shards)} weight files are missing, the first is {missing[0]}",
            who=who,
            fix="copy the folder again",
        )


def read_config(path: Path) -> PretrainedConfig:
    """The configuration of a folder. Raises `ModelError`."""
    check_folder(path, weights=False)
    try:
        return cast(PretrainedConfig, AutoConfig.from_pretrained(path, local_files_only=True))
    except Exception as error:  # transformers raises of every kind here
        raise ModelError(
            f"config.json cannot be used: {error}", who=f"model {path}", fix="check config.json"
        ) from error


def usual_architectures(model_type: str) -> list[str]:
    """The class that makes a language model of this type; none where transformers has no such model.

    Files may leave it out: transformers does without, SGLang does not.
    """
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return [name] if isinstance(name, str) else []


def is_classifier(config: PretrainedConfig) -> bool:
    """Whether the configuration is of a model with a scalar head, as reward models and critics are.

    Sequence classification, or token classification as verl's critics are.
    """
    return _head_of(config) in (SEQUENCE, TOKEN)


def _head_of(config: PretrainedConfig) -> str:
    names = [str(name) for name in config.architectures or ()]
    return next((head for head in (SEQUENCE, TOKEN) if any(name.endswith(head) for name in names)), CAUSAL)


def refuse_classifier(config: PretrainedConfig, *, who: str) -> None:
    """Raise `ModelError` where a language model is wanted and a reward model stands."""
    if is_classifier(config):
        raise ModelError(
            "is a sequence classifier, as reward models are: it generates nothing",
            who=who,
            fix="name a language model here; the reward called model, and critics, take reward models",
        )


def auto_class(config: PretrainedConfig) -> Any:
    """The class of transformers that makes the model: of a language model, or a classifier."""
    return _CLASSES[_head_of(config)]


def read_model(
    path: Path, *, dtype: torch.dtype | Literal["auto"], attention: str | None = None
) -> PreTrainedModel:
    """The model of a folder, on the CPU, in eval mode; ``"auto"`` keeps its own type.

    A causal language model, or a sequence classifier where the configuration says that it is one.
    Raises `ModelError` where a weight is missing or misshapen (it would be random), or where the
    configuration and the weights disagree about tied embeddings.
    """
    check_folder(path)
    config = read_config(path)
    try:
        with without_progress():
            loaded: Any = auto_class(config).from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # transformers raises of every kind here
        damaged = _damaged_file(path)
        raise ModelError(
            f"{damaged} is not whole: {error}" if damaged else f"cannot be loaded: {error}",
            who=f"model {path}",
            fix="copy that file again" if damaged else "check the folder's config.json and weights",
        ) from error
    model, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    _refuse_incomplete(f"model {path}", {**info, "unexpected_keys": ()})
    if is_classifier(config):
        cast(Any, model).generation_config = None  # transformers sets it for models that generate alone
    check_ties(model, who=f"model {path}")
    return model


def _damaged_file(folder: Path) -> str | None:
    """The first file of weights whose own table cannot be read; None where all can."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError):
            return file.name
    return None


def model_of(
    weights: Mapping[str, torch.Tensor],
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    attention: str | None,
    generation: GenerationConfig | None,
    who: str,
) -> PreTrainedModel:
    """A model with these weights, by Hugging Face names, on the CPU, in eval mode.

    Raises `ModelError` where a weight is missing, misshapen or has no place, and for ties as `read_model`.
    """
    try:
        made = auto_class(config)._model_mapping[type(config)]
        with without_progress():
            loaded = made.from_pretrained(
                None,
                config=config,
                state_dict=dict(weights),
                dtype=dtype,
                attn_implementation=attention,
                output_loading_info=True,
            )
    except Exception as error:  # transformers raises of every kind here
        fix = "the weights do not belong to this config.json"
        raise ModelError(f"cannot be made into a model: {error}", who=who, fix=fix) from error
    model, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    _refuse_incomplete(who, info)
    check_ties(model, who=who)
    cast(Any, model).generation_config = None if is_classifier(config) else generation
    return model


@contextmanager
def without_progress() -> Iterator[None]:
    """Keep transformers' progress bars out of our output."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _refuse_incomplete(who: str, info: Mapping[str, Any]) -> None:
    for problem, keys in (
        ("missing", info["missing_keys"]),
        ("of another shape", info["mismatched_keys"]),
        ("of no use to it", info["unexpected_keys"]),
    ):
        names = sorted(str(key) for key in keys)
        if names:
            raise ModelError(
                f"{len(names)} weights are {problem}, the first is {names[0]}",
                who=who,
                fix="the weights do not belong to this config.json; copy the folder again",
            )


def check_ties(model: PreTrainedModel, *, who: str) -> None:
    """Raise `ModelError` where the configuration and the tensors disagree about tied embeddings."""
    if model.get_output_embeddings() is None:
        return
    said, real = bool(model.config.get_text_config().tie_word_embeddings), embeddings_tied(model)
    if said != real:
        raise ModelError(
            f"tie_word_embeddings is {said}, but its embeddings are {'one tensor' if real else 'two'}",
            who=who,
            fix=f'set "tie_word_embeddings": {str(real).lower()} in config.json if the weights are right',
        )
