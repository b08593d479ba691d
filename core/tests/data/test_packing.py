from __future__ import annotations

import json
import random
import statistics
from itertools import chain, pairwise

import pyarrow.parquet as pq
import pytest
import torch
from data_files import SHARED, need
from hypothesis import given, settings
from hypothesis import strategies as st
from posttune.data.packing import (
    ModelBatch,
    TokenSequence,
    collate,
    pack,
    plan,
    restore,
    stats,
    token_index,
)
from posttune.data.partition import balance
from posttune.distributed.ranks import Ranks
from posttune.trainer._batch import even_share
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

Lengths = st.lists(st.integers(1, 60), max_size=60)


@settings(deadline=None)
@given(lengths=Lengths, budget=st.integers(1, 400), row=st.none() | st.integers(1, 100))
def test_every_sequence_once_and_within_the_budget(lengths: list[int], budget: int, row: int | None) -> None:
    plans = plan(lengths, micro_batch_tokens=budget, row_tokens=row)
    assert sorted(chain.from_iterable(micro.order for micro in plans)) == list(range(len(lengths)))
    for micro in plans:
        fills = [sum(lengths[i] for i in indices) for indices in micro.rows]
        assert max(fills) == micro.row_length
        alone = len(micro.order) == 1
        assert alone or micro.tokens <= budget
        assert alone or row is None or micro.row_length <= row
    assert plans == plan(lengths, micro_batch_tokens=budget, row_tokens=row)


@pytest.mark.parametrize("count", [64, 256, 1024, 20_000])
@pytest.mark.parametrize(("low", "high"), [(5, 11), (50, 450)])
def test_padding_is_small_and_rows_are_short(count: int, low: int, high: int) -> None:
    draw = random.Random(count)
    lengths = [draw.randint(low, high) for _ in range(count)]
    plans = plan(lengths, micro_batch_tokens=8192)
    found = stats(plans, lengths)
    assert found.padding_fraction <= 0.01
    assert max(micro.row_length for micro in plans) <= 4 * high
    assert found.attention_waste <= 5


def test_skewed_lengths_still_pack() -> None:
    draw = random.Random(0)
    lengths = [min(4000, int(draw.lognormvariate(5, 1)) + 5) for _ in range(2000)]
    assert stats(plan(lengths, micro_batch_tokens=8192), lengths).padding_fraction <= 0.01


def test_micro_batches_differ_by_a_row_at_most() -> None:
    draw = random.Random(1)
    lengths = [draw.randint(50, 450) for _ in range(2000)]
    tokens = [micro.tokens for micro in plan(lengths, micro_batch_tokens=8192)]
    assert max(tokens) - min(tokens) <= 1000  # a row here is at most that long


def test_a_sequence_beyond_the_budget_stands_alone() -> None:
    plans = plan([5, 100, 6], micro_batch_tokens=32)
    assert [micro.order for micro in plans if 1 in micro.order] == [[1]]
    assert max(micro.row_length for micro in plans if 1 not in micro.order) <= 32


def test_stats_of_known_plan() -> None:
    plans = plan([4, 4, 2], micro_batch_tokens=8, row_tokens=4)
    found = stats(plans, [4, 4, 2])
    assert [micro.rows for micro in plans] == [[[0]], [[1], [2]]]
    assert found.padding_fraction == pytest.approx(2 / 12)
    assert found.tokens_per_row == pytest.approx(10 / 3)
    assert found.attention_waste == pytest.approx(48 / 36)
    assert stats([], []).padding_fraction == 0.0


def _sequences(lengths: list[tuple[int, int]]) -> list[TokenSequence]:
    draw = random.Random(0)
    return [
        TokenSequence([draw.randrange(1, 50) for _ in range(prompt + response)], prompt, group=i)
        for i, (prompt, response) in enumerate(lengths)
    ]


@settings(deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=30),
    budget=st.integers(8, 80),
)
def test_order_is_restored_exactly(lengths: list[tuple[int, int]], budget: int) -> None:
    sequences = _sequences(lengths)
    plans = plan([len(s.ids) for s in sequences], micro_batch_tokens=budget)
    packed = pack(sequences)
    batches = [collate(sequences, micro) for micro in plans]
    expected = torch.tensor(
        [token for s in sequences for token in s.ids[s.response_start :]], dtype=torch.int64
    )
    assert torch.equal(restore([b.targets for b in batches], plans, packed.cu_seqlens), expected)
    for batch in batches:
        index = token_index(packed.cu_seqlens, batch.order)
        assert torch.equal(expected[index], batch.targets)
        assert batch.packed.group == batch.order


def test_collate_places_and_positions() -> None:
    sequences = [TokenSequence([1, 2, 3, 4, 5], 2, [True, False, True]), TokenSequence([6, 7], 1)]
    (micro,) = plan([5, 2], micro_batch_tokens=64, row_tokens=8)
    batch = collate(sequences, micro)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert batch.predict.tolist() == [1, 2, 3, 5]
    assert batch.targets.tolist() == [3, 4, 5, 7]
    assert batch.packed.cu_seqlens.tolist() == [0, 3, 4]
    assert batch.packed.mask.tolist() == [True, False, True, True]


def test_from_mask() -> None:
    mask = [False, False, True, False, True, False]
    sequence = TokenSequence.from_mask([10, 11, 12, 13, 14, 15], mask)
    assert sequence.ids == [10, 11, 12, 13, 14]
    assert sequence.response_start == 2
    assert sequence.response_mask == [True, False, True]
    nothing = TokenSequence.from_mask([1, 2], [False, False])
    assert nothing.response_length == 0


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="response_start 0"):
        TokenSequence([1, 2], 0)
    with pytest.raises(ValueError, match="response mask has 3"):
        TokenSequence([1, 2, 3], 1, [True, True, True])
    with pytest.raises(ValueError, match="loss mask has 1"):
        TokenSequence.from_mask([1, 2], [True])
    with pytest.raises(ValueError, match="no tokens"):
        plan([3, 0], micro_batch_tokens=8)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 100), max_size=50), parts=st.integers(1, 5))
def test_balance(lengths: list[int], parts: int) -> None:
    shares = balance(lengths, parts)
    assert sorted(chain.from_iterable(shares)) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def _model(attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    config._attn_implementation = attention
    model: PreTrainedModel = LlamaForCausalLM(config)
    model.train(False)
    return model


def _worst_gap(model: PreTrainedModel, **options: bool) -> float:
    """Largest difference of the logits that predict response tokens: packed against each sequence alone."""
    sequences = _sequences([(3, 4), (2, 9), (5, 1), (1, 1), (4, 6), (2, 2)])
    plans = plan([len(s.ids) for s in sequences], micro_batch_tokens=48, row_tokens=16)
    assert any(len(row) > 1 for micro in plans for row in micro.rows)
    worst = 0.0
    with torch.no_grad():
        for micro in plans:
            batch = collate(sequences, micro)
            logits = _logits(model, batch, **options)
            for index, (start, end) in zip(batch.order, pairwise(batch.packed.cu_seqlens), strict=True):
                s = sequences[index]
                alone = model(torch.tensor([s.ids]), use_cache=False).logits[0, s.response_start - 1 : -1]
                worst = max(worst, (logits[start:end] - alone).abs().max().item())
    return worst


def _logits(model: PreTrainedModel, batch: ModelBatch, **options: bool) -> torch.Tensor:
    out = model(batch.input_ids, position_ids=batch.position_ids, attention_mask=None, **options)
    logits: torch.Tensor = out.logits.flatten(0, 1)[batch.predict]
    return logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_logits_equal_unpacked(attention: str) -> None:
    assert _worst_gap(_model(attention), use_cache=False) < 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_default_of_transformers_leaks(attention: str) -> None:
    # Why every forward pass here says use_cache=False: without it the rows see their neighbours.
    assert _worst_gap(_model(attention)) > 0.01


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_no_gradient_crosses_sequences(attention: str) -> None:
    model = _model(attention)
    sequences = _sequences([(2, 3), (2, 3)])
    (micro,) = plan([5, 5], micro_batch_tokens=64, row_tokens=10)
    batch = collate(sequences, micro)
    embedded = model.get_input_embeddings()(batch.input_ids).detach().requires_grad_()
    out = model(inputs_embeds=embedded, position_ids=batch.position_ids, use_cache=False)
    out.logits[0, 5:].sum().backward()
    assert embedded.grad is not None
    assert embedded.grad[0, :5].abs().max() == 0
    assert embedded.grad[0, 5:].abs().max() > 0


def _real_lengths(name: str) -> list[int]:
    """About as many tokens as the rows of a real dataset have: four letters each."""
    formats = SHARED / "formats"
    need(formats)
    if name == "gsm8k":
        rows = pq.read_table(formats / "gsm8k_test.parquet").to_pylist()
        return [(len(row["question"]) + len(row["answer"])) // 4 + 1 for row in rows]
    lines = (formats / "ultrafeedback_pref_1000.jsonl").read_text("utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line]
    return [(len(row["prompt"]) + len(row["chosen"])) // 4 + 1 for row in rows]


@pytest.mark.parametrize("name", ["gsm8k", "ultrafeedback"])
def test_real_lengths_over_four_ranks(name: str) -> None:
    lengths = _real_lengths(name)
    spreads = []
    for start in range(0, len(lengths) - 256, 256):
        batch = lengths[start : start + 256]
        places = [even_share(Ranks(rank, 4), range(len(batch)), batch) for rank in range(4)]
        assert sorted(chain.from_iterable(places)) == list(range(len(batch)))
        shares = [[batch[place] for place in share] for share in places]
        plans = [plan(share, micro_batch_tokens=8192) for share in shares]
        computed = sum(micro.tokens for micros in plans for micro in micros)
        assert 1 - sum(batch) / computed <= 0.01
        per_micro = [
            sum(share[i] for i in micro.order)
            for share, micros in zip(shares, plans, strict=True)
            for micro in micros
        ]
        spreads.append(max(per_micro) / min(per_micro) - 1)
    assert statistics.median(spreads) <= 0.03
