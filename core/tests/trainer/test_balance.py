"""After their advantages are known, sequences change places: every process trains on about as many tokens."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from threading import Barrier
from typing import Any, TypeVar

import pytest
import torch
import trainer_toy as toy
from hypothesis import given
from hypothesis import strategies as st
from posttune.data.packing import plan
from posttune.distributed.ranks import Ranks
from posttune.trainer._balance import assign, evened, imbalance
from posttune.trainer._batch import RolloutBatch, make_batch
from posttune.trainer.metrics import Meter
from posttune.types import Completion, Request, Sample
from ranks_toy import SMOOTH, Job, assert_equal_runs, run_ranks

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k" / "test.jsonl"
T = TypeVar("T")
Places = list[list[tuple[int, int]]]


@dataclass(frozen=True)
class Simulated(Ranks):
    """One of several threads that exchange what processes would."""

    table: Any = None  # by share, what it holds out
    meeting: Any = None

    def all_objects(self, item: T) -> list[T]:
        self.meeting.wait()
        self.table[self.rank] = item
        self.meeting.wait()
        return list(self.table)

    def exchanged(self, items: Sequence[T]) -> list[T]:
        return [each[self.rank] for each in self.all_objects(items)]


def together(world: int, work: Callable[[Ranks], T]) -> list[T]:
    """What ``work`` returns in each of ``world`` threads."""
    table, meeting = [None] * world, Barrier(world, timeout=60)
    ranks = [Simulated(rank, world, table=table, meeting=meeting) for rank in range(world)]
    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(work, ranks))


def batch_of(lengths: dict[str, list[int]], prompt: int = 3, logprobs: bool = True) -> RolloutBatch:
    """Answers of these lengths by prompt. Every column tells prompt, answer and place of its token."""
    requests = [Request(name, tuple(range(prompt)), 0) for name in lengths]
    completions = [
        Completion(name, index, tuple(range(size)), tuple(_told(name, index, size)), "stop", 0)
        for name, sizes in lengths.items()
        for index, size in enumerate(sizes)
    ]
    samples = [Sample(each.request_id, each.request_id, "", "", completion=each) for each in completions]
    batch = make_batch(samples, requests, torch.device("cpu"))
    told = [_told(each.request_id, each.index, len(each.token_ids)) for each in completions]
    batch.advantages = torch.tensor(list(chain(*told)))
    batch.old_logp, batch.returns = batch.advantages * 2, batch.advantages * 3
    if not logprobs:
        batch.rollout_logp = None
    return batch


def _told(name: str, index: int, size: int) -> list[float]:
    return [1000.0 * int(name) + 100 * index + place for place in range(size)]


def contents(batch: RolloutBatch) -> list[tuple[Any, ...]]:
    """Every sequence with all that belongs to it."""
    ends = batch.packed.cu_seqlens.tolist()
    columns = (batch.advantages, batch.old_logp, batch.returns, batch.rollout_logp)
    return [
        (
            batch.packed.group[row],
            tuple(batch.sequences[row].ids),
            batch.sequences[row].response_start,
            bool(batch.scored[row]),
            row in batch.fresh,
            *(None if each is None else tuple(each[start:end].tolist()) for each in columns),
        )
        for row, (start, end) in enumerate(pairwise(ends))
    ]


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 500)), max_size=12), min_size=1, max_size=5)
)
def test_every_part_is_as_even_as_its_longest_sequence_allows(sizes: Places) -> None:
    takers = assign(sizes)
    assert [len(each) for each in takers] == [len(each) for each in sizes]
    assert takers == assign(sizes)
    placed = list(zip(chain(*sizes), chain(*takers), strict=True))
    for part in {part for (part, _), _ in placed}:
        loads = [
            sum(tokens for (p, tokens), t in placed if (p, t) == (part, share)) for share in range(len(sizes))
        ]
        assert max(loads) - min(loads) <= max(tokens for (p, tokens), _ in placed if p == part)
    assert imbalance(sizes, takers) >= 1


def test_a_part_with_too_few_sequences_goes_where_least_is() -> None:
    sizes = [[(0, 90), (0, 10), (1, 50), (2, 40)], [], []]
    assert assign(sizes) == [[0, 1, 2, 1], [], []]


def test_every_sequence_arrives_once_with_all_that_is_known_of_it() -> None:
    answers: list[dict[str, list[int]]] = [
        {"0": [40, 30, 35, 25], "1": [30, 28, 26, 5]},
        {"2": [4, 3], "3": [1, 2, 0]},
        {},
    ]
    before = [batch_of(each) for each in answers]
    for batch in before:
        batch.fresh = {row for row, group in enumerate(batch.packed.group) if group in "13"}
        batch.scored[:1] = False
    parts = {"0": 0, "1": 1, "2": 0, "3": 1}
    meters = [Meter() for _ in answers]

    def work(ranks: Ranks) -> RolloutBatch:
        batch = before[ranks.rank]
        return evened(batch, batch.trainable(), parts, ranks, meters[ranks.rank])

    after = together(3, work)
    found = [contents(batch) for batch in after]
    assert sorted(chain(*found)) == sorted(chain(*map(contents, before)))
    assert found == [contents(batch) for batch in together(3, work)]
    for batch, mine in zip(before, found, strict=True):
        left = set(range(len(batch.sequences))) - set(batch.trainable())
        assert {contents(batch)[row] for row in left} <= set(mine)  # what is not trained on stays
    told = [meter.local().peaks for meter in meters]
    assert told[0] == told[1] == told[2]
    assert told[0]["rollout/rank_imbalance"] > 2
    assert told[0]["update/rank_imbalance"] < 1.15
    assert all(batch.values is None for batch in after)


def test_without_log_probabilities_of_the_engine_there_are_none_afterwards() -> None:
    held = [batch_of({"0": [5, 5], "1": [5, 5]}, logprobs=False), batch_of({})]
    assert held[1].rollout_logp is not None  # of no sequence
    after = together(
        2,
        lambda ranks: evened(
            held[ranks.rank], held[ranks.rank].trainable(), {"0": 0, "1": 0}, ranks, Meter()
        ),
    )
    assert [len(batch.sequences) for batch in after] == [2, 2]
    assert all(batch.rollout_logp is None for batch in after)


@pytest.mark.skipif(not GSM8K.is_file(), reason="shared/data is not here")
def test_lengths_of_gsm8k_over_four_ranks() -> None:
    """About four letters a token. Two optimiser steps of 64 prompts with four answers each."""
    rows = [json.loads(line) for line in GSM8K.read_text("utf-8").splitlines()]
    asked, told = ([len(row[name]) // 4 + 1 for row in rows] for name in ("question", "answer"))
    spreads = []
    for start in range(0, len(rows) - 132, 128):
        answers = {str(i): [asked[start + i] + told[start + i + k] for k in range(4)] for i in range(128)}
        parts = {name: int(name) % 2 for name in answers}
        batches = trained(answers, parts)
        for part in range(2):
            chosen = [
                [len(each.ids) for each in batch.sequences if parts[str(each.group)] == part]
                for batch in batches
            ]
            assert max(map(sum, chosen)) / statistics.mean(map(sum, chosen)) < 1.01
            micros = [
                sum(lengths[i] for i in micro.order)
                for lengths in chosen
                for micro in plan(lengths, micro_batch_tokens=8192)
            ]
            spreads.append(max(micros) / min(micros) - 1)
    assert statistics.median(spreads) <= 0.03


def trained(answers: dict[str, list[int]], parts: dict[str, int]) -> list[RolloutBatch]:
    """What four ranks train on that answered these prompts with so many tokens."""

    def work(ranks: Ranks) -> RolloutBatch:
        batch = batch_of({name: answers[name] for name in ranks.share(list(answers))}, prompt=1)
        return evened(batch, batch.trainable(), parts, ranks, Meter())

    return together(4, work)


@pytest.mark.slow
def test_long_answers_of_one_process_are_trained_on_by_both(task: Path, tmp_path: Path) -> None:
    made = toy.rl(
        task,
        batch={"mini_batches": 2},
        rollout={"sampling": {"max_new_tokens": 48}},
        steps=2,
        kl={"where": "loss"},
    )
    stage = toy.merged(made, {"optimizer": SMOOTH})
    recorded = tmp_path / "answers.json"
    recorded.write_text(json.dumps(answers_of(prompts=8, short=5, long=40)))
    Job(tmp_path / "one", stage, recorded=recorded).run()
    run_ranks(2, [Job(tmp_path / "two", stage, recorded=recorded)])
    assert_equal_runs(tmp_path / "one", tmp_path / "two", "rl")
    order = [table.column("prompt_id").to_pylist() for table in toy.rollouts(tmp_path / "one").values()]
    assert order == [
        table.column("prompt_id").to_pylist() for table in toy.rollouts(tmp_path / "two").values()
    ]
    for line in toy.metrics(tmp_path / "two"):
        assert line["rollout/rank_imbalance"] > 1.3
        assert line["update/rank_imbalance"] < 1.03


def answers_of(prompts: int, short: int, long: int) -> dict[str, list[Any]]:
    """What an engine would answer, by version, temperature, prompt and number: a step's second half long."""
    found = {}
    for prompt in range(prompts):
        for index in range(4):
            size = (long if prompt % 4 >= 2 else short) + (prompt + 3 * index) % 4
            ids = [3 + (prompt * 7 + index * 13 + place * place) % 90 for place in range(size)]
            key = f"{prompt // 4}/1.0/{prompt}/{index}"
            found[key] = [str(prompt), index, ids, [-4.0] * size, "length", prompt // 4]
    return found
