"""Packed log-probabilities equal a plain forward pass of each sequence alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from posttune.config.models import LoraConfig
from posttune.data.packing import TokenSequence, collate, plan, restore
from posttune.models.forward import ForwardOut, response_logprobs
from posttune.models.load import new_model
from posttune.models.lora import apply_lora
from posttune.models.tokenizer import byte_tokenizer
from posttune.testing.tiny import tiny_model
from transformers import AutoModelForCausalLM

LENGTHS = [(9, 4), (3, 1), (17, 16), (5, 2), (12, 7), (2, 1), (30, 11)]  # tokens, start of the response


def sequences() -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(3)
    draw = [torch.randint(3, 259, (length,), generator=generator).tolist() for length, _ in LENGTHS]
    return [TokenSequence(ids, start) for ids, (_, start) in zip(draw, LENGTHS, strict=True)]


def packed(model: Any, *, row_tokens: int, temperature: float, entropy: bool = False) -> ForwardOut:
    batch = sequences()
    lengths = [len(sequence.ids) for sequence in batch]
    plans = plan(lengths, micro_batch_tokens=2 * row_tokens, row_tokens=row_tokens)
    outs = [
        response_logprobs(model, collate(batch, micro), temperature=temperature, entropy=entropy)
        for micro in plans
    ]
    counts = [0] + [len(s.ids) - s.response_start for s in batch]
    cu_seqlens = torch.tensor(counts).cumsum(0)
    logp = restore([out.logp for out in outs], plans, cu_seqlens)
    if not entropy:
        return ForwardOut(logp, None)
    parts = [out.entropy for out in outs if out.entropy is not None]
    return ForwardOut(logp, restore(parts, plans, cu_seqlens))


def plain(model: Any, *, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence at a time through the model's own head, the softmax in float64."""
    logps, entropies = [], []
    for sequence in sequences():
        ids = torch.tensor([list(sequence.ids)])
        logits = model(input_ids=ids, use_cache=False).logits[0].double() / temperature
        logp = torch.log_softmax(logits, -1)[sequence.response_start - 1 : -1]
        logps.append(logp.gather(-1, ids[0, sequence.response_start :, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
    return torch.cat(logps), torch.cat(entropies)


def made(model_type: str, **more: Any) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = new_model({"model_type": model_type, **sizes, **more}, byte_tokenizer(), seed=1)
    with torch.no_grad():
        for parameter in model.parameters():  # far from uniform, or nothing would show
            parameter.mul_(4)
    return model


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "final_logit_softcapping": 2.0},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0},
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return made(request.param, **MODELS[request.param])


@pytest.mark.parametrize("row_tokens", [30, 64])
def test_packed_equals_one_by_one(model: Any, row_tokens: int) -> None:
    with torch.no_grad():
        out = packed(model, row_tokens=row_tokens, temperature=0.7, entropy=True)
        logp, entropy = plain(model, temperature=0.7)
    assert out.logp.dtype == torch.float32
    assert out.entropy is not None
    torch.testing.assert_close(out.logp.double(), logp, rtol=0, atol=2e-5)
    torch.testing.assert_close(out.entropy.double(), entropy, rtol=0, atol=2e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_float64_agrees_to_float32_softmax(attention: str, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation=attention)
    with torch.no_grad():
        out = packed(model, row_tokens=40, temperature=1.0)
        logp, _ = plain(model, temperature=1.0)
    torch.testing.assert_close(out.logp.double(), logp, rtol=0, atol=2e-6)


def test_gradients_equal_one_by_one() -> None:
    model = made("llama", num_key_value_heads=2)
    packed(model, row_tokens=40, temperature=1.3).logp.sum().backward()
    got = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    plain(model, temperature=1.3)[0].sum().backward()
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=2e-5 * max(scale, 1))


def test_with_adapters_that_differ_from_zero() -> None:
    base = made("llama", num_key_value_heads=2)
    before = packed(base, row_tokens=40, temperature=1.0).logp.detach()
    model = apply_lora(base, LoraConfig(rank=4), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0), std=0.05)
        out = packed(model, row_tokens=40, temperature=1.0)
        logp, _ = plain(model, temperature=1.0)
    torch.testing.assert_close(out.logp.double(), logp, rtol=0, atol=2e-5)
    assert (out.logp - before).abs().max() > 1e-2


def test_only_the_predicting_positions_reach_the_head() -> None:
    model = made("llama", num_key_value_heads=2)
    seen: list[int] = []
    handle = model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    packed(model, row_tokens=1000, temperature=1.0)
    handle.remove()
    assert seen == [sum(length - start for length, start in LENGTHS)]
    ids = torch.tensor([[5, 6, 7]])
    assert model(input_ids=ids).logits.shape == (1, 3, 259)  # the hook is gone


def test_temperature_must_be_positive() -> None:
    model = made("llama", num_key_value_heads=2)
    with pytest.raises(ValueError, match="temperature"):
        packed(model, row_tokens=40, temperature=0.0)
