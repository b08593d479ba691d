"""Log-probabilities in pieces are those of whole logits, and so are their gradients."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from posttune.config.models import LoraConfig
from posttune.data.packing import TokenSequence, collate, plan
from posttune.loss.entropy import entropy as entropy_of
from posttune.models import forward
from posttune.models.forward import ForwardOut, limit_logits, response_logprobs
from posttune.models.linear_logprobs import Shape, linear_logprobs
from posttune.models.load import new_model
from posttune.models.logit_shape import fit
from posttune.models.lora import apply_lora, inner_model
from posttune.models.tokenizer import byte_tokenizer
from torch import Tensor

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "logprob_memory.py"
SHAPES = {
    "plain": Shape(),
    "temperature": Shape(temperature=0.6),
    "scale": Shape(temperature=1.3, scale=0.25),
    "soft cap": Shape(temperature=0.8, softcap=2.0),
    "scale and soft cap": Shape(temperature=0.8, scale=3.0, softcap=2.0),
}


def leaves(bias: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(23, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(41, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    more = torch.randn(41, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, more if bias else None, torch.randint(41, (23,), generator=generator)


def whole(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, shape: Shape
) -> tuple[Tensor, Tensor]:
    """The same from whole logits, by autograd."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * shape.scale
    if shape.softcap is not None:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    logits = logits / shape.temperature
    logp = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
    return logp, entropy_of(logits)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("piece", [1, 50, 97, 10_000])
@pytest.mark.parametrize("name", SHAPES)
def test_value_and_gradient_are_those_of_whole_logits(name: str, piece: int, bias: bool) -> None:
    hidden, weight, more, targets = leaves(bias)
    logp, spread = linear_logprobs(
        hidden, weight, targets, more, shape=SHAPES[name], entropy=True, piece=piece
    )
    wanted, wanted_spread = whole(hidden, weight, targets, more, SHAPES[name])
    assert spread is not None
    torch.testing.assert_close(logp, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(spread, wanted_spread, rtol=1e-12, atol=1e-12)

    slope = torch.linspace(-1, 2, len(logp), dtype=torch.float64)
    inputs = [each for each in (hidden, weight, more) if each is not None]
    got = torch.autograd.grad((logp * slope).sum() + (spread * slope.flip(0)).sum(), inputs)
    expected = torch.autograd.grad((wanted * slope).sum() + (wanted_spread * slope.flip(0)).sum(), inputs)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("which", ["logp", "entropy"])
def test_each_output_alone_can_be_differentiated(which: str) -> None:
    hidden, weight, _, targets = leaves(bias=False)
    logp, spread = linear_logprobs(hidden, weight, targets, entropy=True, piece=60)
    wanted, wanted_spread = whole(hidden, weight, targets, None, Shape())
    assert spread is not None
    pair = (logp, wanted) if which == "logp" else (spread, wanted_spread)
    got, expected = (torch.autograd.grad(each.square().sum(), [hidden, weight]) for each in pair)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_a_frozen_projection_gets_no_gradient() -> None:
    hidden, weight, _, targets = leaves(bias=False)
    logp, _ = linear_logprobs(hidden, weight.detach(), targets, piece=60)
    logp.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_no_rows_give_nothing_and_a_gradient_of_zero() -> None:
    hidden, weight, _, targets = leaves(bias=False)
    logp, spread = linear_logprobs(hidden[:0], weight, targets[:0], entropy=True)
    assert spread is not None
    assert logp.shape == spread.shape == (0,)
    (logp.sum() + spread.sum()).backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_a_word_that_cannot_be_drawn_adds_nothing_to_the_entropy() -> None:
    hidden, weight, more, targets = leaves(bias=True)
    assert more is not None
    with torch.no_grad():
        more[7] = -math.inf
        targets = torch.where(targets == 7, 8, targets)
    logp, spread = linear_logprobs(hidden, weight, targets, more, entropy=True, piece=60)
    wanted, wanted_spread = whole(hidden, weight, targets, more, Shape())
    assert spread is not None
    torch.testing.assert_close(logp, wanted)
    torch.testing.assert_close(spread, wanted_spread)
    (logp.sum() + spread.sum()).backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_half_precision_rounds_no_worse_than_whole_logits() -> None:
    hidden, weight, _, targets = leaves(bias=False)
    exact = torch.autograd.grad(whole(hidden, weight, targets, None, Shape())[0].sum(), [hidden, weight])
    half = [each.detach().to(torch.bfloat16).requires_grad_() for each in (hidden, weight)]
    logp, _ = linear_logprobs(half[0], half[1], targets, piece=60)
    assert logp.dtype == torch.float32
    mine = torch.autograd.grad(logp.sum(), half)
    logits = torch.nn.functional.linear(half[0], half[1]).float()
    wanted = torch.log_softmax(logits, -1).gather(-1, targets[:, None]).sum()
    plain = torch.autograd.grad(wanted, half)
    for place in range(2):
        errors = [(found[place].double() - exact[place]).abs().mean() for found in (mine, plain)]
        assert errors[0] < 1.2 * errors[1]


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "final_logit_softcapping": 2.0},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
}


def made(model_type: str) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields = MODELS[model_type] if model_type == "gpt2" else sizes | MODELS[model_type]
    model = new_model({"model_type": model_type, **fields}, byte_tokenizer(), seed=1)
    with torch.no_grad():
        for parameter in model.parameters():  # far from uniform, or nothing would show
            parameter.mul_(3)
    return model.double()


def outcome(model: Any, *, limit: int, train: bool = False) -> ForwardOut:
    """Of two packed sequences, with at most ``limit`` logits at a time."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 259, (40,), generator=generator).tolist()
    sequences = [TokenSequence(ids[:17], 4), TokenSequence(ids[17:], 9)]
    (micro,) = plan([17, 23], micro_batch_tokens=64, row_tokens=64)
    forward._LIMITS[inner_model(model)] = limit
    model.train(train)
    return response_logprobs(model, collate(sequences, micro), temperature=0.7, entropy=True)


def gradients(model: Any, out: ForwardOut) -> dict[str, Tensor]:
    model.zero_grad()
    assert out.entropy is not None
    slope = torch.linspace(-1, 2, len(out.logp), dtype=out.logp.dtype)
    ((out.logp * slope).sum() + (out.entropy * slope.flip(0)).sum()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model_type", MODELS)
def test_every_head_gives_the_same_in_pieces(model_type: str) -> None:
    model = made(model_type)
    whole_out = outcome(model, limit=10**9)
    wanted = gradients(model, whole_out)
    out = outcome(model, limit=700)
    assert type(out.logp.grad_fn).__name__ == "AddBackward0"  # it went the other way
    torch.testing.assert_close(out.logp, whole_out.logp, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(out.entropy, whole_out.entropy, rtol=1e-9, atol=1e-9)
    got = gradients(model, out)
    assert got.keys() == wanted.keys()
    for name, grad in got.items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-8, atol=1e-9, msg=name)


def test_adapters_learn_the_same_in_pieces() -> None:
    model = apply_lora(made("llama"), LoraConfig(rank=2), seed=0).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    wanted = gradients(model, outcome(model, limit=10**9, train=True))
    got = gradients(model, outcome(model, limit=700, train=True))
    assert got.keys() == wanted.keys()
    for name, grad in got.items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-8, atol=1e-9, msg=name)


def test_a_model_that_treats_its_logits_in_its_own_way_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = made("llama")
    plain = model.forward

    def odd(*arguments: Any, **options: Any) -> Any:
        out = plain(*arguments, **options)
        out.logits = out.logits + 0.1 * out.logits**2
        return out

    model.forward = odd
    wanted = outcome(model, limit=10**9)
    out = outcome(model, limit=700)
    torch.testing.assert_close(out.logp, wanted.logp, rtol=0, atol=0)
    assert "in its own way" in caplog.text


def test_looking_at_the_head_leaves_modes_and_random_numbers_alone() -> None:
    model: Any = apply_lora(made("llama"), LoraConfig(rank=2, dropout=0.5), seed=0)
    model.train()
    model.base_model.model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(1)
    with torch.no_grad():
        first = response_logprobs(model, batch(), temperature=1.0)
        drawn = torch.rand(1)
        limit_logits(model, 1)
        forward._LIMITS[inner_model(model)] = 700
        torch.manual_seed(1)
        second = response_logprobs(model, batch(), temperature=1.0)
    assert torch.equal(drawn, torch.rand(1))
    assert modes == [module.training for module in model.modules()]
    torch.testing.assert_close(first.logp, second.logp)


def batch() -> Any:
    (micro,) = plan([20], micro_batch_tokens=64, row_tokens=64)
    return collate([TokenSequence(list(range(5, 25)), 3)], micro)


@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.0625, None), (1.0, 30.0), (0.5, 15.0)])
def test_scale_and_soft_cap_are_read_off(scale: float, cap: float | None) -> None:
    given = [0.0, 2.0**-10, -(2.0**-10), 0.5, -0.5, 3.0, -3.0, 17.0, -17.0, 80.0, 1e6, -1e6]
    seen = [scale * number if cap is None else cap * math.tanh(scale * number / cap) for number in given]
    found = fit(given, seen)
    assert found is not None
    assert found.scale == pytest.approx(scale, rel=1e-9)
    assert found.softcap == (None if cap is None else pytest.approx(cap, rel=1e-9))


@pytest.mark.slow
def test_pieces_take_less_than_a_seventh_of_the_memory(tmp_path: Path) -> None:
    """At a sixteenth of 32,768 tokens x 152,064 words in each direction, and pieces of 2 MiB."""
    report = tmp_path / "report.json"
    sizes = ["--tokens", "2048", "--vocabulary", "9504", "--mib", "2", "--plain-share", "1"]
    subprocess.run([sys.executable, BENCHMARK, *sizes, "--json", report], check=True, capture_output=True)
    found = json.loads(report.read_text())
    assert found["plain"]["peak_mib"] > 2 * 2048 * 9504 * 4 / 2**20  # logits and their gradient at least
    assert found["share"] < 0.15
    assert found["pieces"]["loss_per_token"] == pytest.approx(found["plain"]["loss_per_token"], rel=1e-5)
