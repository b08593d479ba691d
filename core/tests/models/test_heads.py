"""Scalar heads: what they stand on, where they are read, and what cannot have one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from posttune.config.models import LoraConfig, ModelConfig
from posttune.data.packing import ModelBatch, TokenSequence, collate, plan
from posttune.errors import ModelError
from posttune.models.attention import VARLEN, register
from posttune.models.heads import add_head, choose_padding
from posttune.models.load import load_model, new_model
from posttune.models.load_scalar import load_critic, load_reward_model
from posttune.models.lora import inner_model
from posttune.models.tokenizer import byte_tokenizer
from posttune.models.values import check_packing, response_values, sequence_scores
from posttune.testing.tiny import tiny_model
from transformers import JambaConfig, JambaForSequenceClassification


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "base", layers=2)


def sequences() -> list[TokenSequence]:
    draw = torch.Generator().manual_seed(3)
    lengths = [(9, 4), (5, 1), (12, 7), (3, 2), (7, 6)]
    made = []
    for length, start in lengths:
        ids = torch.randint(3, 259, (length,), generator=draw).tolist()
        made.append(TokenSequence(ids, start))
    return made


def batches(given: list[TokenSequence], row_tokens: int | None = None) -> list[ModelBatch]:
    lengths = [len(sequence.ids) for sequence in given]
    plans = plan(lengths, micro_batch_tokens=64, row_tokens=row_tokens)
    return [collate(given, micro) for micro in plans]


def direct(model: Any, ids: list[int]) -> list[float]:
    """The head at every token of one sequence, by transformers' own forward pass over its prefixes."""
    with torch.no_grad():
        return [
            float(model(input_ids=torch.tensor([ids[: end + 1]])).logits[0, 0]) for end in range(len(ids))
        ]


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize("row_tokens", [None, 14])
def test_a_value_is_that_of_the_state_before_its_token(
    folder: Path, lora: LoraConfig | None, row_tokens: int | None
) -> None:
    loaded = load_reward_model(ModelConfig(lora=lora), folder, seed=1)
    loaded.model.config.pad_token_id = None  # transformers then takes the last token, whatever it is
    given = sequences()
    for batch in batches(given, row_tokens):
        values, scores = response_values(loaded.model, batch), sequence_scores(loaded.model, batch)
        assert values.dtype == scores.dtype == torch.float32
        assert values.shape == batch.targets.shape
        for place, index in enumerate(batch.order):
            sequence = given[index]
            expected = direct(loaded.model, list(sequence.ids))
            start, end = batch.packed.cu_seqlens[place : place + 2].tolist()
            assert values[start:end].tolist() == pytest.approx(
                expected[sequence.response_start - 1 : -1], abs=1e-6
            )
            assert scores[place].item() == pytest.approx(expected[-1], abs=1e-6)


def test_gradients_reach_the_body(folder: Path) -> None:
    loaded = load_reward_model(ModelConfig(), folder, seed=1)
    (batch,) = batches(sequences())
    response_values(loaded.model, batch).sum().backward()
    grads = {name: param.grad for name, param in loaded.model.named_parameters()}
    assert all(grad is not None for grad in grads.values())


def test_the_head_follows_from_the_seed_and_the_body_from_the_folder(folder: Path) -> None:
    plain = load_model(ModelConfig(), folder, seed=0).model
    one, again, other = (load_reward_model(ModelConfig(), folder, seed=seed).model for seed in (1, 1, 2))
    assert torch.equal(one.score.weight, again.score.weight)
    assert not torch.equal(one.score.weight, other.score.weight)
    assert one.score.weight.std().item() == pytest.approx(65**-0.5, rel=0.3)
    body = dict(plain.named_parameters())
    for name, parameter in one.named_parameters():
        assert name == "score.weight" or torch.equal(parameter, body[name])


def test_a_new_critic_values_everything_at_nothing(folder: Path) -> None:
    loaded = load_critic(ModelConfig(), folder, seed=1)
    (batch,) = batches(sequences())
    assert torch.equal(response_values(loaded.model, batch), torch.zeros(len(batch.targets)))


def test_a_new_model_can_have_a_head() -> None:
    init = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    loaded = load_critic(ModelConfig(init=init, tokenizer="bytes"), None, seed=1)
    assert loaded.source is None
    assert loaded.model.score.weight.shape == (1, 16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_beside_adapters_the_head_is_trained_in_float32(folder: Path, dtype: Any) -> None:
    loaded = load_reward_model(ModelConfig(dtype=dtype, lora=LoraConfig(rank=2)), folder, seed=1)
    trained = {name: p.dtype for name, p in loaded.model.named_parameters() if p.requires_grad}
    assert set(trained.values()) == {torch.float32}
    assert sum(name.endswith("score.weight") for name in trained) == 1
    assert all(".lora_" in name or name.endswith("score.weight") for name in trained)
    assert not any("score" in name and ".lora_" in name for name in trained)
    assert loaded.model(input_ids=torch.tensor([[5, 6]])).logits.isfinite().all()
    assert inner_model(loaded.model).dtype == getattr(torch, dtype)


def test_tied_embeddings_are_no_obstacle(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, tie=True, layers=1)
    loaded = load_reward_model(ModelConfig(lora=LoraConfig(rank=2)), folder, seed=1)
    assert not loaded.tied
    inner_model(load_reward_model(ModelConfig(), folder, seed=1).model).save_pretrained(tmp_path / "reward")
    byte_tokenizer().save_pretrained(tmp_path / "reward")
    with pytest.raises(ModelError, match="is a sequence classifier"):
        load_model(ModelConfig(), tmp_path / "reward", seed=0)


def test_an_architecture_without_the_form_is_refused() -> None:
    fields = {"model_type": "codegen", "n_embd": 16, "n_layer": 1, "n_head": 4, "rotary_dim": 2}
    model = new_model(fields, byte_tokenizer(), seed=0)
    with pytest.raises(ModelError, match="no fitting sequence-classification form of CodeGenForCausalLM"):
        add_head(model, who="model m", seed=0)


def test_a_model_that_mixes_packed_sequences_is_refused() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    torch.manual_seed(0)
    config = JambaConfig(
        vocab_size=40,
        num_hidden_layers=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=1,
        mamba_d_state=4,
        use_mamba_kernels=False,
        num_labels=1,
        initializer_range=0.3,
        **sizes,
    )
    model = JambaForSequenceClassification(config)
    with pytest.raises(ModelError, match="does not keep the sequences of a packed row apart"):
        check_packing(model, who="model jamba")


def test_a_model_for_a_gpu_is_checked_while_it_waits_on_the_host(folder: Path) -> None:
    # A kernel for GPUs cannot run there; a critic that is offloaded from the start is loaded so.
    model = load_reward_model(ModelConfig(), folder, seed=0).model
    model.set_attn_implementation(register(VARLEN))
    check_packing(model, who="model")
    assert model.config._attn_implementation == VARLEN


def test_padding_is_never_what_ends_a_sequence(folder: Path) -> None:
    config = load_model(ModelConfig(), folder, seed=0).model.config
    tokenizer = byte_tokenizer()
    choose_padding(tokenizer, config)
    assert (tokenizer.pad_token, config.pad_token_id) == ("<pad>", 0)
    tokenizer.pad_token = "<eos>"
    choose_padding(tokenizer, config)
    assert (tokenizer.pad_token, config.pad_token_id) == ("<bos>", 1)
    config.eos_token_id = [2, 1]
    choose_padding(tokenizer, config)
    assert (tokenizer.pad_token, config.pad_token_id) == ("<pad>", 0)
