"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685), by peft."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from posttune.config.models import LoraConfig
from posttune.distributed.tensors import full
from posttune.errors import CheckpointError, ModelError
from posttune.models.heads import HEAD, find_head, float_head

if TYPE_CHECKING:
    import peft

ADAPTER = "default"

# peft takes two seconds to import. Where nobody has imported it there are no adapters, nor while another
# thread, as that of a reward, imports it: its modules are listed then, and lack their classes yet.


def is_lora(model: nn.Module) -> TypeGuard[peft.PeftModel]:
    """Whether the model carries adapters."""
    wrapper = getattr(sys.modules.get("peft"), "PeftModel", None)
    return wrapper is not None and isinstance(model, wrapper)


def is_adapted(layer: nn.Module) -> bool:
    """Whether the layer is one of peft's, with adapters beside the weights of the model."""
    adapted = getattr(sys.modules.get("peft.tuners.lora"), "LoraLayer", None)
    return adapted is not None and isinstance(layer, adapted)


def inner_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself, without peft's wrapper (its adapters stay in it)."""
    return cast(PreTrainedModel, model.get_base_model() if is_lora(model) else model)


def apply_lora(model: PreTrainedModel, config: LoraConfig, *, seed: int) -> peft.PeftModel:
    """Freeze the model and add adapters, whose first weights come from ``seed``.

    Adapters are float32 whatever the model's type. A scalar head has none: it is trained whole, in
    float32 too. Raises `ModelError` for targets that do not exist
    or that are tied to another weight.
    """
    import peft

    _refuse_tied_targets(model, config)
    scalar = find_head(model) is not None
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=cast(int, config.alpha),  # any number, whatever its annotation says
        lora_dropout=config.dropout,
        target_modules=config.target_modules,
        bias="none",
        task_type=None if scalar else peft.TaskType.CAUSAL_LM,
        exclude_modules=[HEAD] if scalar else None,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's, about names in transformers
        torch.manual_seed(seed)
        try:
            made = cast("peft.PeftModel", peft.get_peft_model(model, settings, adapter_name=ADAPTER))
        except ValueError as error:
            raise ModelError(
                f"the adapters cannot be placed: {error}",
                who="lora.target_modules",
                fix='name modules of the model, such as ["q_proj", "v_proj"], or "all-linear"',
            ) from error
    if scalar:
        float_head(model)
    return made


def _refuse_tied_targets(model: PreTrainedModel, config: LoraConfig) -> None:
    if not model.config.get_text_config().tie_word_embeddings or config.target_modules == "all-linear":
        return
    ends = {name.rsplit(".", 1)[-1] for name in _embedding_names(model)}
    targets = [config.target_modules] if isinstance(config.target_modules, str) else config.target_modules
    wrong = sorted(ends & {target.rsplit(".", 1)[-1] for target in targets})
    if wrong:
        raise ModelError(
            f"{', '.join(wrong)} is tied to another weight: an adapter there could not be merged",
            who="lora.target_modules",
            fix="leave it out, or train a model with tie_word_embeddings: false",
        )


def _embedding_names(model: PreTrainedModel) -> Iterator[str]:
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    for name, module in model.named_modules():
        if any(module is embedding for embedding in embeddings):
            yield name


def describe(model: nn.Module) -> dict[str, Any] | None:
    """What rebuilds the adapters: rank, alpha, dropout and the targets; None without adapters."""
    if not is_lora(model):
        return None
    settings = cast("peft.LoraConfig", model.peft_config[ADAPTER])
    targets = settings.target_modules
    return {
        "rank": settings.r,
        "alpha": float(settings.lora_alpha),
        "dropout": float(settings.lora_dropout),
        "target_modules": targets if isinstance(targets, str) else sorted(targets or ()),
    }


def from_description(description: Mapping[str, Any], *, who: str) -> LoraConfig:
    """The inverse of `describe`. Raises `CheckpointError` where a value is missing or impossible."""
    for key in ("rank", "alpha", "target_modules"):
        if not description.get(key):
            raise CheckpointError(
                f"the description of its adapters has no usable {key!r} (found {description.get(key)!r})",
                who=who,
                fix="without it the adapters' scale is unknown; use another checkpoint",
            )
    return LoraConfig(
        rank=int(description["rank"]),
        alpha=float(description["alpha"]),
        dropout=float(description.get("dropout", 0.0)),
        target_modules=description["target_modules"],
    )


def merged_weight(layer: nn.Module) -> torch.Tensor:
    """Weight of the wrapped layer with its update added, in float32; whole where it is cut."""
    lora = cast(Any, layer)
    weight = full(lora.get_base_layer().weight.detach())
    with _whole_adapters(layer):
        update: torch.Tensor = lora.get_delta_weight(ADAPTER).detach()
    return weight.float() + update.float()


@contextmanager
def _whole_adapters(layer: nn.Module) -> Iterator[None]:
    """Adapters that are cut over processes are whole inside, as copies."""
    cut = [
        (module, name, parameter)
        for path, module in layer.named_modules()
        if "lora_" in path
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    ]
    try:
        for module, name, parameter in cut:
            setattr(module, name, nn.Parameter(full(parameter.detach()), requires_grad=False))
        yield
    finally:
        for module, name, parameter in cut:
            setattr(module, name, parameter)


def merge(model: PreTrainedModel) -> PreTrainedModel:
    """Add the adapters, if any, to the weights in place, and return the plain model."""
    if not is_lora(model):
        return model
    for module in model.modules():
        if is_adapted(module):
            cast(Any, module).get_base_layer().weight.data.copy_(merged_weight(module))
    return cast(PreTrainedModel, cast(Any, model).unload())
