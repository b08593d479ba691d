"""Which attention implementation runs, and variable-length kernels as some of them.

Packed rows hold several sequences, told apart by ``position_ids`` that restart. sdpa, eager and flex keep
them apart with a mask over the whole row; the variable-length kernels compute each sequence alone.
transformers' own ``flash_attention_2`` keeps them apart in batches of one row only
(``_is_packed_sequence``), and a micro-batch may have several: the package is called from here instead.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from posttune.errors import ModelError

Attention = Literal["auto", "flash", "sdpa", "eager", "flex"]

VARLEN = "posttune_varlen"  # torch's kernel
PACKED = "posttune_packed"  # flash-attn's; transformers expects things of names with "flash" in them
_NOT_HERE = ("softcap", "s_aux")  # options of some architectures that would be left out
_HALF = (torch.bfloat16, torch.float16)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """What is installed."""

    flash: bool  # the package flash-attn
    varlen: bool  # torch.nn.attention.varlen

    @classmethod
    def here(cls) -> Kernels:
        """What is installed here; nothing is imported."""
        return cls(flash=_exists("flash_attn"), varlen=_exists("torch.nn.attention.varlen"))


def attention_name(
    choice: Attention, *, dtype: torch.dtype, device: torch.device, kernels: Kernels | None = None
) -> str | None:
    """The implementation's name for transformers; None leaves it to transformers (sdpa, mostly).

    ``auto`` is flash where its package serves, eager in half precision on a CPU (there sdpa's backward
    pass over short packed rows takes twice as long), else transformers' choice. What cannot run is
    replaced, and a line in the log says so.
    """
    if choice in ("sdpa", "eager"):
        return choice
    if choice == "flex":
        return (
            _instead(choice, "it has no backward pass on a CPU") if device.type == "cpu" else "flex_attention"
        )
    kernels = kernels or Kernels.here()
    fits = device.type == "cuda" and dtype in _HALF
    if choice == "auto":
        if device.type == "cpu":
            return "eager" if dtype in _HALF else None
        return register(PACKED) if fits and kernels.flash else None
    if not fits:
        return _instead(choice, "it needs a GPU and bfloat16 or float16")
    if kernels.flash:
        return register(PACKED)
    if kernels.varlen:
        _say_once("model.attention: flash-attn is not installed, torch's own kernel serves", logging.INFO)
        return register(VARLEN)
    return _instead(choice, "neither flash-attn nor torch's own kernel is installed")


def register(name: str) -> str:
    """Make a variable-length kernel known to transformers, by the ``name`` that is returned."""
    AttentionInterface.register(name, flash_forward if name == PACKED else varlen_forward)
    AttentionMaskInterface.register(name, varlen_mask)
    return name


@contextmanager
def where_it_lies(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block a model that waits on the host computes there, with sdpa: kernels need the GPU."""
    name = model.config._attn_implementation
    if model.device.type != "cpu" or name not in (VARLEN, PACKED):
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(name)


def varlen_mask(*arguments: Any, **options: Any) -> torch.Tensor | None:
    """No mask where the kernel serves: no padding, no cache, no window. Else sdpa's."""
    plain = options.get("attention_mask") is None and options.get("local_size") is None
    if plain and not arguments and options["q_length"] == options["kv_length"]:
        return None
    return sdpa_mask(*arguments, **options)


def flash_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The same as `varlen_forward` with the kernel of the package flash-attn."""
    return varlen_forward(module, query, key, value, attention_mask, **{**options, "kernel": _flash})


def varlen_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    kernel: Kernel | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sequence; [R, heads, T, d] in, [R, T, heads, d] out.

    With a mask or a cache sdpa computes it. Raises `ModelError` for an architecture that does not say
    where sequences begin, or that has what a kernel lacks.
    """
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return out, None
    positions = options.get("position_ids")
    foreign = dropout or any(options.get(name) is not None for name in _NOT_HERE)
    if positions is None or positions.ndim != 2 or foreign:
        what = f"{type(module).__name__} cannot use a variable-length kernel"
        raise ModelError(what, who="model.attention", fix="set attention: eager (or sdpa)")
    rows, _, length, _ = query.shape
    layout = sequence_layout(positions.expand(rows, length))
    q, k, v = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    return (kernel or _kernel)(q, k, v, layout, scaling).unflatten(0, (rows, length)), None


@dataclass(frozen=True)
class Layout:
    """Where the sequences of flattened rows lie: int32 [S + 1], and the longest."""

    bounds: torch.Tensor
    longest: int


def sequence_layout(position_ids: torch.Tensor) -> Layout:
    """The sequences of packed rows, from positions [R, T] that go up by one inside each."""
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids.diff(dim=1) != 1
    first = starts.flatten().nonzero().flatten()
    bounds = torch.cat([first, first.new_tensor([position_ids.numel()])]).to(torch.int32)
    return Layout(bounds, int(bounds.diff().max()))


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Layout, float | None], torch.Tensor]
"""Query, key and value [tokens, heads, d] to [tokens, heads, d]; key and value may have fewer heads."""


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, scale: float | None
) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    ends, longest = layout.bounds, layout.longest
    out = flash_attn_varlen_func(
        query, key, value, ends, ends, longest, longest, softmax_scale=scale, causal=True
    )
    assert isinstance(out, torch.Tensor)  # no second output was asked for
    return out


def _kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, scale: float | None
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    grouped = query.shape[1] != key.shape[1]
    if grouped:
        repeats = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
    bounds, longest = layout.bounds, layout.longest
    out = varlen_attn(query, key, value, bounds, bounds, longest, longest, scale=scale, window_size=(-1, 0))
    assert isinstance(out, torch.Tensor)  # no second output was asked for
    return out


def _instead(choice: str, why: str) -> str:
    _say_once(f"model.attention: sdpa instead of {choice}: {why}", logging.WARNING)
    return "sdpa"


@lru_cache(maxsize=16)
def _say_once(text: str, level: int) -> None:
    """A run loads several models: policy, reference, critic."""
    _log.log(level, text)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
