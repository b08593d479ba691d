"""The model that a stage trains or evaluates: loaded from a path, or made from a configuration."""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from posttune.checkpoint.sources import open_source
from posttune.config.models import ModelConfig
from posttune.errors import ModelError
from posttune.models.hf_folder import attention_name, refuse_classifier
from posttune.models.lora import apply_lora, inner_model, is_lora
from posttune.models.params import embeddings_tied
from posttune.models.tokenizer import check_survives, load_tokenizer

if TYPE_CHECKING:
    import peft

_TOKEN_ROLES = ("bos_token_id", "eos_token_id", "pad_token_id")
_ALSO_KNOWN = {"rope_theta", "rope_scaling", "partial_rotary_factor"}  # taken into rope_parameters


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for use, in eval mode: a trainer calls ``model.train()`` itself."""

    model: PreTrainedModel  # with adapters: a peft.PeftModel around it
    tokenizer: PreTrainedTokenizerBase
    source: Path | None  # what it was loaded from; None where it was made
    base_dtype: torch.dtype  # of the weights as they are stored at the source
    tied: bool  # one tensor is both embeddings

    @property
    def lora(self) -> bool:
        """Whether adapters alone are trained."""
        return is_lora(self.model)

    @property
    def base(self) -> Path | None:
        """The folder whose weights stay as they are: what a checkpoint of adapters refers to."""
        return self.source if self.lora else None

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends a completion."""
        return eos_ids(self.model, self.tokenizer)


def load_model(
    config: ModelConfig,
    path: Path | None,
    *,
    seed: int,
    device: str | torch.device = "cpu",
    move: bool = True,
) -> LoadedModel:
    """Load ``path`` (a Hugging Face folder, a checkpoint, a run folder), or make ``config.init``.

    Weights that are made, and adapters, are a function of ``seed`` alone, on every device. Without
    ``move`` they stay on the CPU, for whoever places them on the device in parts.
    Raises `ModelError` and `CheckpointError`.
    """
    if path is None and config.init is None:
        raise ModelError("neither path nor init is given", who="model", fix="give one of the two")
    device = torch.device(device)
    dtype = cast(torch.dtype, getattr(torch, config.dtype))
    attention = attention_name(config.attention, dtype=dtype, device=device)
    if path is None:
        tokenizer = _tokenizer_of_new(config)
        model = new_model(config.init or {}, tokenizer, seed=seed, dtype=dtype, attention=attention)
        check_survives(tokenizer, model.config)
        source, base_dtype = None, dtype
    else:
        opened = open_source(path)
        refuse_classifier(opened.config, who=f"model {path}")
        tokenizer = load_tokenizer(config.tokenizer or opened.tokenizer_dir)
        model = opened.load_merged(dtype=dtype, attention=attention)
        source, base_dtype = opened.path, opened.dtype
    check_vocabulary(model.config, tokenizer)
    tied = embeddings_tied(model)
    if move:
        cast(torch.nn.Module, model).to(device)
    model = prepare(model, config, seed)
    return LoadedModel(model=model, tokenizer=tokenizer, source=source, base_dtype=base_dtype, tied=tied)


def prepare(model: PreTrainedModel, config: ModelConfig, seed: int) -> PreTrainedModel:
    """Gradient checkpointing and adapters where the configuration asks for them; in eval mode."""
    if config.gradient_checkpointing:
        _recompute_activations(model)
    if config.lora is not None:
        if config.gradient_checkpointing:
            model.enable_input_require_grads()
        model = cast(PreTrainedModel, apply_lora(model, config.lora, seed=seed))
    model.eval()
    return model


def _recompute_activations(model: PreTrainedModel) -> None:
    """Gradient checkpointing under the name that this version of transformers wants."""
    try:
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        fix = "set gradient_checkpointing: false"
        raise ModelError(str(error), who="model.gradient_checkpointing", fix=fix) from error


def new_model(
    fields: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
) -> PreTrainedModel:
    """A model with random weights from the fields of a transformers configuration.

    The vocabulary's size and the special ids come from the tokenizer where they are not given.
    """
    config = new_config(fields, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
            raise ModelError(
                f"no model can be made of these fields: {error}",
                who="model.init",
                fix="check sizes and heads",
            ) from error
    model.config.architectures = [type(model).__name__]
    model.generation_config = GenerationConfig(**{role: getattr(config, role, None) for role in _TOKEN_ROLES})
    model.eval()
    return cast(PreTrainedModel, model)


def new_config(fields: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """The configuration of `new_model`. Raises `ModelError` with the nearest right name."""
    values: dict[str, Any] = {"vocab_size": len(tokenizer)}
    values |= {role: getattr(tokenizer, role) for role in _TOKEN_ROLES}
    values |= dict(fields)
    model_type = values.pop("model_type", None)
    _check_fields(model_type, values)
    try:
        return AutoConfig.for_model(model_type, **values)
    except Exception as error:  # each architecture validates in its own way
        raise ModelError(
            str(error), who="model.init", fix=f"see the fields of {model_type} in transformers"
        ) from error


def _check_fields(model_type: Any, values: Mapping[str, Any]) -> None:
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING.keys()), n=1)
        raise ModelError(
            f"model_type {model_type!r} is unknown to transformers",
            who="model.init",
            fix=f"did you mean {near[0]!r}?" if near else "name one, such as llama or qwen2",
        )
    cls = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map) | _ALSO_KNOWN
    for name in values:
        if name not in known and name not in _TOKEN_ROLES:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            raise ModelError(
                f"{name!r} is no field of a {model_type} configuration",
                who="model.init",
                fix=f"did you mean {near[0]!r}?" if near else "remove it",
            )


def _tokenizer_of_new(config: ModelConfig) -> PreTrainedTokenizerBase:
    if config.tokenizer is None:
        raise ModelError(
            "a new model has no tokenizer", who="model.init", fix='add tokenizer: "bytes" or a folder'
        )
    return load_tokenizer(config.tokenizer)


def check_vocabulary(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ModelError` where the tokenizer has ids that the embedding has not."""
    rows = config.get_text_config().vocab_size
    if len(tokenizer) > rows:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocabulary only {rows}",
            who="model",
            fix="give the tokenizer that the model was trained with",
        )


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that ends a completion: of the generation configuration, the model's and the tokenizer."""
    inner = inner_model(model)
    configs = (inner.generation_config, inner.config.get_text_config())
    found: set[int] = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    for config in configs:
        value = getattr(config, "eos_token_id", None)
        found |= set() if value is None else {value} if isinstance(value, int) else set(value)
    return frozenset(found)


@dataclass(frozen=True)
class Reference:
    """The policy as it was when the stage began."""

    model: PreTrainedModel
    _adapters_off: bool

    @contextmanager
    def use(self) -> Iterator[PreTrainedModel]:
        """Yield the reference in eval mode, without gradient; the trained model is as before afterwards."""
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                if self._adapters_off:
                    with cast("peft.PeftModel", self.model).disable_adapter():
                        yield self.model
                else:
                    yield self.model
        finally:
            self.model.train(training)


def load_reference(loaded: LoadedModel) -> Reference:
    """The reference policy: with LoRA the same module, adapters off; else a frozen copy of its weights now.

    Call it before a checkpoint is loaded into the model.
    """
    if loaded.lora:
        return Reference(loaded.model, _adapters_off=True)
    frozen = copy.deepcopy(loaded.model)
    frozen.requires_grad_(False)
    frozen.eval()
    return Reference(frozen, _adapters_off=False)
