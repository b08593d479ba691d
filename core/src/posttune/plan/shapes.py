"""What a model would take: its weights and activations, found out without any memory for them.

The model is made on torch's meta device from its configuration, so every architecture is as it is.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
)

from posttune.config.models import LoraConfig, ModelConfig
from posttune.errors import ModelError

ATTENTION = "posttune_plan"
_PROBE = 64  # tokens; activations are proportional to them
PER_LAYER = 17  # numbers a hidden unit, where the architecture cannot be tried
_VOCABULARY_OF_BYTES = 259


@dataclass(frozen=True)
class ModelShape:
    """Counts of one model. ``activation_bytes`` are what one token leaves for the backward pass."""

    name: str
    weights: int  # numbers
    trained: tuple[tuple[int, ...], ...]  # shapes of the parameters that are trained
    item: int  # bytes of a weight
    trained_item: int  # bytes of a trained one: adapters are float32
    vocabulary: int
    hidden: int
    layers: int
    key_values: int  # numbers that one token adds to a cache
    activation_bytes: int  # all layers, without the head
    largest_layer_bytes: int  # of them, one layer's

    @property
    def bytes(self) -> int:
        """Of the weights."""
        return self.weights * self.item

    @property
    def trained_count(self) -> int:
        """Numbers that are trained."""
        return sum(_count(shape) for shape in self.trained)


def _count(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def model_shape(config: ModelConfig, path: Path | None, *, scalar: bool = False) -> ModelShape:
    """The shape of the model at ``path``, or of ``config.init``; ``scalar``: with a head of one number.

    Reads config.json and nothing else. Raises `ModelError`.
    """
    found = read_config(path) if path is not None else _new_config(config.init or {})
    dtype = getattr(torch, config.dtype)
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model: nn.Module = AutoModelForCausalLM.from_config(
            found, dtype=dtype, attn_implementation=_registered()
        )
    text = found.get_text_config()
    saved = _saved_bytes(model, text.hidden_size, text.num_hidden_layers, dtype)
    head = model.get_output_embeddings()  # type: ignore[operator]
    own = {id(param): tuple(param.shape) for param in model.parameters()}
    if scalar and head is not None and id(head.weight) in own:
        tied = head.weight is model.get_input_embeddings().weight  # type: ignore[operator]
        own = own if tied else {key: shape for key, shape in own.items() if key != id(head.weight)}
        own[-1] = (1, text.hidden_size)
    trained = _adapters(model, head, config.lora) if config.lora else tuple(own.values())
    adapters = sum(map(_count, trained)) * 4 // dtype.itemsize if config.lora else 0
    return ModelShape(
        name=str(path or found.model_type),
        weights=sum(map(_count, own.values())) + adapters,
        trained=trained,
        item=dtype.itemsize,
        trained_item=4 if config.lora else dtype.itemsize,
        vocabulary=text.vocab_size,
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        key_values=_key_values(text),
        activation_bytes=saved,
        largest_layer_bytes=saved // max(1, text.num_hidden_layers),
    )


def read_config(path: Path) -> PretrainedConfig:
    """The configuration of a Hugging Face folder, or of a checkpoint. Raises `ModelError`."""
    file = next(
        (each for each in (path / "config.json", path / "hf" / "config.json") if each.is_file()), None
    )
    if file is None:
        fix = "give a Hugging Face folder or a checkpoint; a plan reads its config.json"
        raise ModelError("holds no config.json", who=str(path), fix=fix)
    try:
        found = json.loads(file.read_text("utf-8"))
        return AutoConfig.for_model(found.pop("model_type"), **found)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"is unusable: {error}", who=str(file), fix="mend the file") from error


def _new_config(fields: Mapping[str, Any]) -> PretrainedConfig:
    values = {"vocab_size": _VOCABULARY_OF_BYTES, **fields}
    return AutoConfig.for_model(values.pop("model_type"), **values)


def _key_values(text: Any) -> int:
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return (
        2 * int(text.num_hidden_layers) * int(getattr(text, "num_key_value_heads", None) or heads) * int(size)
    )


def _adapters(model: nn.Module, head: nn.Module | None, lora: LoraConfig) -> tuple[tuple[int, ...], ...]:
    """Shapes of the adapters that peft would add."""
    targets = lora.target_modules
    found: list[tuple[int, ...]] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or module is head:
            continue
        last = name.rpartition(".")[2]
        if targets in ("all-linear", last) or (isinstance(targets, list) and last in targets):
            found += [(lora.rank, module.in_features), (module.out_features, lora.rank)]
    return tuple(found)


class _Attention(torch.autograd.Function):
    """Keeps what a fused kernel keeps: queries, keys, values and its output."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


def _attend(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    apply: Any = _Attention.apply
    return apply(query, key, value).transpose(1, 2), None


def _no_mask(*_arguments: Any, **_options: Any) -> None:
    return None


def _registered() -> str:
    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, _no_mask)
    return ATTENTION


def _saved_bytes(model: nn.Module, hidden: int, layers: int, dtype: torch.dtype) -> int:
    """Bytes that a token leaves for the backward pass in the layers, weights not counted.

    Where the architecture cannot be tried: 34 bytes a hidden unit and layer in half precision, as
    Korthikanti et al. 2022 (arXiv:2205.05198) count without the attention matrix.
    """
    model.train()
    ids = torch.zeros(1, _PROBE, dtype=torch.int64, device="meta")
    mask = torch.ones_like(ids)  # with it nobody looks for packed sequences, which takes numbers
    try:
        with _counted(model) as seen:
            model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)  # type: ignore[operator]
    except (RuntimeError, NotImplementedError):  # it looks at numbers, which a meta tensor has none of
        return layers * hidden * dtype.itemsize * PER_LAYER
    return sum(seen.values()) // _PROBE


@contextmanager
def _counted(model: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes of every storage that is saved in the block, by its identity."""
    weights = {param.untyped_storage()._cdata for param in model.parameters()}
    kept: list[Tensor] = []  # alive, so that no identity comes twice
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept.append(tensor)
            seen[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield seen
