from __future__ import annotations

import logging
import sys
import types
from itertools import pairwise
from typing import Any

import pytest
import torch
from posttune.data.packing import TokenSequence, collate, plan
from posttune.errors import ModelError
from posttune.models import attention
from posttune.models.attention import (
    Attention,
    Kernels,
    Layout,
    attention_name,
    register,
    sequence_layout,
)
from torch.nn import functional
from torch.nn.attention import flex_attention
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import flex_attention as transformers_flex

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NOTHING, ALL, TORCH = Kernels(False, False), Kernels(True, True), Kernels(False, True)
FULL, HALF = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("choice", "dtype", "device", "kernels", "name"),
    [
        ("auto", FULL, CPU, ALL, None),
        ("auto", HALF, CPU, ALL, "eager"),
        ("auto", HALF, GPU, ALL, attention.PACKED),
        ("auto", FULL, GPU, ALL, None),
        ("auto", HALF, GPU, TORCH, None),
        ("flash", HALF, GPU, ALL, attention.PACKED),
        ("flash", HALF, GPU, TORCH, attention.VARLEN),
        ("flash", HALF, GPU, NOTHING, "sdpa"),
        ("flash", FULL, GPU, ALL, "sdpa"),
        ("flash", HALF, CPU, ALL, "sdpa"),
        ("flex", HALF, GPU, NOTHING, "flex_attention"),
        ("flex", FULL, CPU, ALL, "sdpa"),
        ("sdpa", HALF, GPU, ALL, "sdpa"),
        ("eager", HALF, GPU, ALL, "eager"),
    ],
)
def test_dispatch(
    choice: Attention, dtype: torch.dtype, device: torch.device, kernels: Kernels, name: str | None
) -> None:
    assert attention_name(choice, dtype=dtype, device=device, kernels=kernels) == name


@pytest.mark.parametrize("choice", ["flash", "flex"])
def test_a_replacement_is_said_in_one_line(choice: Attention, caplog: pytest.LogCaptureFixture) -> None:
    attention._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):  # policy, reference, critic
            assert attention_name(choice, dtype=FULL, device=CPU) == "sdpa"
    assert len(caplog.records) == 1
    assert f"sdpa instead of {choice}" in caplog.text


def test_layout_of_packed_rows() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 0]])
    layout = sequence_layout(positions)
    assert layout.bounds.tolist() == [0, 3, 5, 6, 10, 11, 12]
    assert layout.longest == 4


def reference_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, scale: float | None
) -> torch.Tensor:
    """What the kernel computes, a sequence at a time, where there is no GPU."""
    parts = []
    for start, end in pairwise(layout.bounds.tolist()):
        q, k, v = (states[start:end].transpose(0, 1) for states in (query, key, value))
        repeats = q.shape[0] // k.shape[0]
        k, v = (states.repeat_interleave(repeats, dim=0) for states in (k, v))
        parts.append(functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale))
    return torch.cat([part.transpose(0, 1) for part in parts])


def model(name: str, device: torch.device = CPU, dtype: torch.dtype = FULL) -> Any:
    torch.manual_seed(0)
    fields: dict[str, Any] = {"attn_implementation": name}
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **fields,
    )
    made: Any = LlamaForCausalLM(config).eval()
    return made.to(device=device, dtype=dtype)


def worst_gap(net: Any, device: torch.device = CPU) -> float:
    """Largest difference between the logits of packed sequences and of each alone."""
    sequences = [
        TokenSequence([(7 * place + size) % 60 + 1 for place in range(size)], 1) for size in (5, 9, 3, 12)
    ]
    (micro,) = plan([len(s.ids) for s in sequences], micro_batch_tokens=64, row_tokens=17)
    batch = collate(sequences, micro, device)
    worst = 0.0
    with torch.no_grad():
        found = net(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        packed = found.flatten(0, 1)[batch.predict].float()
        for index, (start, end) in zip(batch.order, pairwise(batch.packed.cu_seqlens), strict=True):
            ids = torch.tensor([sequences[index].ids], device=device)
            alone = net(ids, use_cache=False).logits[0, :-1].float()
            worst = max(worst, (packed[start:end] - alone).abs().max().item())
    return worst


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_packed_equals_unpacked(name: str) -> None:
    assert worst_gap(model(name)) < 1e-5


@pytest.mark.slow
def test_packed_equals_unpacked_with_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its masks; uncompiled, for a compiler takes minutes over the five shapes."""

    def plain(*states: torch.Tensor, training: bool = False, **given: Any) -> Any:
        return flex_attention.flex_attention(*states, **given)

    monkeypatch.setattr(transformers_flex, "compile_friendly_flex_attention", plain)
    assert worst_gap(model("flex_attention")) < 1e-5


def test_packed_equals_unpacked_with_torchs_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_kernel", reference_kernel)
    net = model(register(attention.VARLEN))
    assert worst_gap(net) < 1e-5
    same = model("sdpa")
    ids = torch.randint(1, 60, (2, 11), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(net(ids).logits, same(ids).logits)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None,
    causal: bool,
) -> torch.Tensor:
    """What the package's function of this name computes."""
    assert causal
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert cu_seqlens_q.dtype == torch.int32
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    return reference_kernel(q, k, v, Layout(cu_seqlens_q, max_seqlen_q), softmax_scale)


def test_packed_equals_unpacked_with_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    # Several rows a batch, where transformers' flash_attention_2 would mix the sequences of a row.
    package = types.ModuleType("flash_attn")
    package.__dict__["flash_attn_varlen_func"] = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    net = model(register(attention.PACKED))
    assert worst_gap(net) < 1e-5
    ids = torch.randint(1, 60, (2, 11), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(net(ids).logits, model("sdpa")(ids).logits)


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_what_a_kernel_lacks_is_refused(name: str) -> None:
    states = torch.zeros(1, 2, 3, 4)
    positions = torch.arange(3)[None]
    with pytest.raises(ModelError, match="cannot use a variable-length kernel"):
        attention.varlen_forward(
            torch.nn.Identity(), states, states, states, None, position_ids=positions, **{name: 1.0}
        )


def test_generation_falls_back_to_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_kernel", reference_kernel)
    ids = torch.randint(1, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    asked = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    ours = model(register(attention.VARLEN)).generate(ids, **asked)
    theirs = model("sdpa").generate(ids, **asked)
    assert torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("choice", ["auto", "flash", "sdpa", "eager", "flex"])
def test_packed_equals_unpacked_on_a_gpu(choice: Attention) -> None:
    name = attention_name(choice, dtype=HALF, device=GPU)
    net = model(name or "sdpa", GPU, HALF)
    assert worst_gap(net, GPU) < 0.05
    loss = net(torch.ones(1, 16, dtype=torch.int64, device=GPU), use_cache=False).logits.float().logsumexp(-1)
    loss.sum().backward()
    assert all(weight.grad is not None for weight in net.parameters())
