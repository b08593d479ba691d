"""Uniforms and the inverse CDF: the right distribution, from the sample's own randomness."""

from __future__ import annotations

import math

import pytest
import torch
from posttune.config.models import SamplingConfig
from posttune.engines.drawing import stream_keys, truncate, uniforms, uniforms_at
from posttune.rollout._plan import Limits, Span, plan
from posttune.rollout._sampling import draw
from posttune.rollout.requests import derive_seed, make_requests, make_sampling
from posttune.types import Request, Sampling


def test_uniforms_belong_to_seed_index_and_position():
    both = uniforms([5, 5, 6], [0, 1, 0], 8)
    assert both.shape == (3, 8, 2)
    torch.testing.assert_close(uniforms([5], [1], 3)[0], both[1, :3], atol=0, rtol=0)
    assert len(torch.unique(both)) == both.numel()
    assert both.min() >= 0
    assert both.max() < 1


def test_uniforms_are_uniform_and_independent():
    values = uniforms(list(range(2000)), [0] * 2000, 50).double()
    assert values.mean().item() == pytest.approx(0.5, abs=0.003)
    assert values.var().item() == pytest.approx(1 / 12, abs=0.002)
    flat = values.reshape(2000, -1)
    correlation = torch.corrcoef(flat.T[:40])
    assert (correlation - torch.eye(40)).abs().max() < 0.12
    neighbours = torch.corrcoef(torch.stack([flat[:-1].flatten(), flat[1:].flatten()]))[0, 1]
    assert abs(neighbours) < 0.01


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1, -1, 2**70])
def test_any_integer_is_a_seed(seed):
    assert torch.isfinite(uniforms([seed], [0], 4)).all()


@pytest.mark.parametrize("vocabulary", [7, 1024, 1025, 3000])
def test_draws_have_the_distribution_of_the_logits(vocabulary):
    rows = 20000
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(vocabulary, generator=generator) * 2
    logits[3] = logits.max() + 1
    got, logp = draw(
        logits.expand(rows, -1), uniforms(list(range(rows)), [0] * rows, 1)[:, 0], Sampling(temperature=1.3)
    )
    p = (logits / 1.3).softmax(-1)
    counts = torch.bincount(got, minlength=vocabulary) / rows
    assert (counts - p).abs().max() < 4 * math.sqrt(0.25 / rows)
    torch.testing.assert_close(logp, p.log()[got], atol=1e-5, rtol=0)


@pytest.mark.parametrize("vocabulary", [9, 2000])
def test_the_ends_of_the_unit_interval(vocabulary):
    logits = torch.full((2, vocabulary), -math.inf)
    logits[:, 2] = logits[:, 5] = 0.0
    ends = torch.tensor([[0.0, 0.0], [1 - 2**-24, 1 - 2**-24]])
    assert draw(logits, ends, Sampling())[0].tolist() == [2, 5]


def test_top_k_and_top_p():
    p = torch.tensor([[0.1, 0.4, 0.05, 0.25, 0.2]])
    rows = 4000
    u = uniforms(list(range(rows)), [0] * rows, 1)[:, 0]
    for sampling, kept in [
        (Sampling(top_k=2), {1, 3}),
        (Sampling(top_p=0.6), {1, 3}),
        (Sampling(top_p=0.66), {1, 3, 4}),
        (Sampling(top_p=1e-6), {1}),
        (Sampling(top_k=3, top_p=0.5), {1, 3}),
        (Sampling(top_k=50), {0, 1, 2, 3, 4}),
    ]:
        got, logp = draw(p.log().expand(rows, -1), u, sampling)
        assert set(got.tolist()) == kept
        total = sum(p[0, token].item() for token in kept)
        torch.testing.assert_close(logp, (p[0, got] / total).log(), atol=1e-5, rtol=0)


def test_the_plan_covers_every_sample_once_longest_first():
    lengths = [3, 9, 1, 9, 4]
    requests = [Request(str(i), (1,) * length, 0) for i, length in enumerate(lengths)]
    batches = plan(requests, 5, 2, Limits(rows=4, memory=10**9, per_token=1))
    rows = [(span.position, span.first + k) for batch in batches for span in batch for k in range(span.count)]
    assert sorted(rows) == [(i, j) for i in range(5) for j in range(5)]
    assert all(sum(span.count for span in batch) <= 4 for batch in batches)
    assert batches[0] == [Span(1, 0, 4)]
    assert [lengths[batch[0].position] for batch in batches] == [9, 9, 9, 4, 3, 1, 1]


def test_the_plan_keeps_to_the_memory_but_for_a_row_that_alone_exceeds_it():
    requests = [Request(str(i), (1,) * 8, 0) for i in range(4)]
    sizes = [sum(s.count for s in b) for b in plan(requests, 2, 2, Limits(None, 70, per_token=2, per_row=10))]
    assert sizes == [2, 2, 2, 2]
    assert len(plan(requests, 2, 2, Limits(None, 1, per_token=2))) == 8


def test_seeds_of_requests_follow_the_run_and_the_id():
    a, b = make_requests(["0", "1"], [[1], [2]], seed=3)
    assert a.seed != b.seed
    assert make_requests(["1"], [[2]], seed=3)[0] == b
    assert make_requests(["1"], [[2]], seed=4)[0].seed != b.seed
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert 0 <= derive_seed(0) < 2**63


def test_every_sampling_option_reaches_the_engine():
    config = SamplingConfig(n=2, temperature=0.5, top_p=0.9, top_k=3, max_new_tokens=7, stop=["x"])
    wanted = Sampling(2, 0.5, 0.9, 3, 7, ("x",), frozenset({4}), False)
    assert make_sampling(config, [4], logprobs=False) == wanted


def test_a_stream_read_on_the_device_is_the_same():
    seeds, indices = [5, -7, 2**63 + 11, 0], [0, 3, 1, 2]
    keys = torch.from_numpy(stream_keys(seeds, indices).view("int64"))
    whole = uniforms(seeds, indices, 40)
    for position in (0, 1, 39):
        found = uniforms_at(keys, torch.full((4,), position))
        torch.testing.assert_close(found, whole[:, position], atol=0, rtol=0)
    assert uniforms_at(keys, torch.tensor([3, 1, 2, 0]))[0].tolist() == whole[0, 3].tolist()


def test_truncation_row_by_row_is_that_of_one_for_all():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)) * 3
    top_k, top_p = [0, 1, 7, 50, 99, 3], [1.0, 0.9, 0.5, 0.2, 0.99, 1.0]
    asked = torch.tensor([k or 1 << 30 for k in top_k])
    found = truncate(logits, asked, torch.tensor(top_p))
    for row, (k, p) in enumerate(zip(top_k, top_p, strict=True)):
        torch.testing.assert_close(found[row], truncate(logits[row : row + 1], k, p)[0])
