"""The reward_model stage: it learns, its loss is Bradley and Terry's, and nothing depends on the packing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import preference_toy as toy
import pytest
import torch
from posttune.config.models import PackingConfig
from posttune.data.conversion import ConvertRequest, convert
from posttune.data.dataset import SampleDataset
from posttune.distributed.ranks import Ranks
from posttune.errors import ConfigError, DataError, ModelError
from posttune.models.tokenizer import byte_tokenizer
from posttune.trainer._holdout import split
from posttune.trainer._pairs import margins, pair_batches, read_pairs
from posttune.trainer.loop import Position
from posttune.trainer.reward_model import RewardModelWork
from posttune.trainer.stage import Setup
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2ForSequenceClassification


def work_of(setup: Setup) -> RewardModelWork:
    assert isinstance(setup.work, RewardModelWork)
    return setup.work


def steps(setup: Setup, count: int) -> list[dict[str, float]]:
    position, found = Position(), []
    for _ in range(count):
        output = setup.work.step(position)
        position = position.after(output.rows)
        found.append(output.metrics)
    return found


def weights(setup: Setup) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in setup.loaded.model.named_parameters()}


@pytest.mark.slow
def test_it_learns_what_is_held_out(trained: Path) -> None:
    lines = toy.metrics(trained)
    accuracy = {line["step"]: line["val/accuracy"] for line in lines if "val/accuracy" in line}
    assert list(accuracy) == [20, 40, 60]
    assert accuracy[60] > 0.9
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=0.05)
    assert lines[-1]["loss"] < 0.2
    assert lines[-1]["val/loss"] < 0.3
    assert lines[-1]["val/margin"] > 1
    keys = {"accuracy", "margin", "grad_norm", "lr", "tokens_per_s", "update/padding_fraction", "val/pairs"}
    assert keys <= lines[-1].keys()


def direct_margin(model: Any, chosen: list[int], rejected: list[int]) -> float:
    """transformers' own score of each sequence alone, with no packing and no padding."""
    with torch.no_grad():
        scores = [float(model(input_ids=torch.tensor([ids])).logits[0, 0]) for ids in (chosen, rejected)]
    return scores[0] - scores[1]


def test_the_loss_is_minus_log_sigmoid_of_the_difference(task: Path, tmp_path: Path) -> None:
    setup = toy.prepared(tmp_path, toy.stage(task))
    setup.loaded.model.score.weight.data *= 1000  # scores of a fresh head hardly differ
    work = work_of(setup)
    dataset = SampleDataset(task / "data")
    rows = [work.rows[place] for place in work.sampler.indices(0, 8)]
    found_margins = [
        direct_margin(setup.loaded.model, row["input_ids"], row["rejected_ids"])
        for row in (dataset[index] for index in rows)
    ]
    assert max(map(abs, found_margins)) > 0.05
    (found,) = steps(setup, 1)
    expected = sum(math.log1p(math.exp(-margin)) for margin in found_margins) / 8
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert found["margin"] == pytest.approx(sum(found_margins) / 8, rel=1e-4, abs=1e-5)
    assert found["accuracy"] == sum(margin > 0 for margin in found_margins) / 8


def test_scores_are_read_at_the_end_of_the_sequence(task: Path) -> None:
    dataset = SampleDataset(task / "data")
    eos = 2
    for row in (dataset[index] for index in range(20)):
        assert row["input_ids"][-1] == row["rejected_ids"][-1] == eos


def test_packed_equals_unpacked(task: Path, tmp_path: Path) -> None:
    model = toy.prepared(tmp_path, toy.stage(task)).loaded.model
    pairs = read_pairs(SampleDataset(task / "data"), range(13))
    alone = [
        margins(model, next(iter(pair_batches([pair], PackingConfig(), Ranks())))).detach() for pair in pairs
    ]
    for packing in (PackingConfig(row_tokens=200), PackingConfig(micro_batch_tokens=64)):
        batches = list(pair_batches(pairs, packing, Ranks()))
        assert sum(len(batch.order) for batch in batches) == 26
        for batch in batches:
            found = margins(model, batch)
            expected = torch.cat([alone[place // 2] for place in batch.order[::2]])
            assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("packing", [{"micro_batch_tokens": 70}, {"row_tokens": 45}])
def test_any_split_over_micro_batches_gives_the_same(
    task: Path, tmp_path: Path, packing: dict[str, int]
) -> None:
    smooth = {"lr": 1e-3, "eps": 1e-3}  # Adam with a small one turns rounding into a step of lr
    setups = [
        toy.prepared(tmp_path / str(number), toy.stage(task, optimizer=smooth, packing=each))
        for number, each in enumerate(({}, packing))
    ]
    for one, other in zip(*(steps(setup, 3) for setup in setups), strict=True):
        for name in ("loss", "grad_norm", "margin", "accuracy"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
    first, second = map(weights, setups)
    assert all(torch.allclose(first[name], second[name], atol=1e-5) for name in first)


def test_a_prompt_is_on_one_side_and_the_split_is_recorded(task: Path, tmp_path: Path) -> None:
    dataset = SampleDataset(task / "data")
    found = split(dataset, len(dataset), 0.2, seed=3)
    assert sorted(found.trained + found.held_out) == list(range(len(dataset)))
    assert len(found.held_out) == pytest.approx(0.2 * len(dataset), abs=2)
    sides = [{dataset[index]["prompt"] for index in rows} for rows in (found.trained, found.held_out)]
    assert not sides[0] & sides[1]
    assert len(sides[1]) < len(found.held_out)  # prompts with two pairs are among them
    assert split(dataset, len(dataset), 0.2, seed=3) == found
    assert split(dataset, len(dataset), 0.2, seed=4) != found

    setup = toy.prepared(tmp_path, toy.stage(task, holdout={"fraction": 0.2}))
    record = json.loads((tmp_path / "data" / "judge-holdout.json").read_text())
    assert record["dataset"] == dataset.fingerprint
    assert not set(record["held_out"]) & set(work_of(setup).rows)
    assert record["trained"] == len(work_of(setup).rows)


def test_other_data_can_be_held_out(task: Path, tmp_path: Path) -> None:
    source = toy.write(toy.pairs(10, seed=9), tmp_path / "rows.jsonl")
    convert(ConvertRequest([source], tmp_path / "held"))  # text: tokenised when the stage begins
    fields = toy.stage(task, steps=1, holdout={"data": {"path": str(tmp_path / "held"), "limit": 7}})
    result = toy.run_stage(tmp_path / "run", fields)
    assert result.metrics["val/pairs"] == 7
    setup = toy.prepared(tmp_path / "again", toy.stage(task, steps=1, holdout={"fraction": 0.0}))
    assert setup.validation is None
    assert len(work_of(setup).rows) == 300


def test_epochs_count_the_rows_that_are_trained_on(task: Path, tmp_path: Path) -> None:
    setup = toy.prepared(tmp_path, toy.stage(task, steps=None, epochs=2.0, batch_size=50))
    rows = work_of(setup).rows
    assert setup.total_steps == math.ceil(2 * len(rows) / 50) == 11


def test_pairs_of_equal_answers_are_left_out(task: Path, tmp_path: Path) -> None:
    same = [{**row, "rejected": row["chosen"]} for row in toy.pairs(8)]
    source = toy.write([*toy.pairs(1), *same], tmp_path / "rows.jsonl")
    convert(ConvertRequest([source], tmp_path / "data", tokenizer=task / "model"))
    data = {"path": str(tmp_path / "data"), "shuffle": False}
    losses = []
    for batch_size in (1, 8):
        fields = toy.stage(task, data=data, holdout={"fraction": 0.0}, batch_size=batch_size)
        (found,) = steps(toy.prepared(tmp_path / "run", fields), 1)
        losses.append(found["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    with pytest.raises(DataError, match="none of the 1 pairs of step 2 has two answers that differ"):
        toy.run_stage(tmp_path / "run", {**fields, "batch_size": 1})


def test_a_learning_rate_of_zero_leaves_the_weights(task: Path, tmp_path: Path) -> None:
    setup = toy.prepared(tmp_path, toy.stage(task, optimizer={"lr": 0.0}))
    before = weights(setup)
    steps(setup, 2)
    assert all(torch.equal(before[name], now) for name, now in weights(setup).items())


def test_adapters_and_the_head_alone_are_trained(task: Path, tmp_path: Path) -> None:
    model = {"path": str(task / "model"), "lora": {"rank": 4}}
    fields = toy.stage(task, model=model, optimizer={"lr": 1e-2}, steps=2)
    setup = toy.prepared(tmp_path / "a", fields)
    before = weights(setup)
    steps(setup, 2)
    moved = {name for name, now in weights(setup).items() if not torch.equal(before[name], now)}
    assert all(".lora_" in name or name.endswith("score.weight") for name in moved)
    assert any(".lora_" in name for name in moved)
    assert any(name.endswith("score.weight") for name in moved)
    result = toy.run_stage(tmp_path / "b", fields)
    written = AutoModelForSequenceClassification.from_pretrained(result.output)
    ids = torch.tensor([SampleDataset(task / "data")[0]["input_ids"]])
    live = setup.loaded.model.eval()
    assert torch.allclose(written(input_ids=ids).logits, live(input_ids=ids).logits, atol=1e-5)


def test_gradient_checkpointing_changes_nothing(task: Path, tmp_path: Path) -> None:
    found = []
    for on in (False, True):
        model = {"path": str(task / "model"), "gradient_checkpointing": on}
        setup = toy.prepared(tmp_path / str(on), toy.stage(task, model=model))
        found.append([each["loss"] for each in steps(setup, 2)])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_data_without_rejected_answers_is_refused(task: Path, tmp_path: Path) -> None:
    source = toy.write([{"prompt": "a", "response": "b"}] * 9, tmp_path / "rows.jsonl")
    convert(ConvertRequest([source], tmp_path / "data", tokenizer=task / "model"))
    with pytest.raises(DataError, match="is no preference data"):
        toy.run_stage(tmp_path / "run", toy.stage(task, data=str(tmp_path / "data")))


def test_one_prompt_cannot_be_split(task: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": str(number), "rejected": "x"} for number in range(9)]
    convert(ConvertRequest([toy.write(rows, tmp_path / "r.jsonl")], tmp_path / "d", tokenizer=task / "model"))
    with pytest.raises(DataError, match="all 9 rows have the same prompt"):
        toy.prepared(tmp_path / "run", toy.stage(task, data=str(tmp_path / "d")))


def test_pairs_longer_than_the_model_are_refused(task: Path, tmp_path: Path) -> None:
    rows = [*toy.pairs(3), {"prompt": "a", "chosen": "b", "rejected": "c" * 3000}]
    convert(ConvertRequest([toy.write(rows, tmp_path / "r.jsonl")], tmp_path / "d", tokenizer=task / "model"))
    with pytest.raises(DataError, match="1 of 4 pairs are longer than the model's 2048 positions"):
        toy.prepared(tmp_path / "run", toy.stage(task, data=str(tmp_path / "d")))
    data = {"path": str(tmp_path / "d"), "max_length": 64, "truncation": "left"}
    setup = toy.prepared(tmp_path / "run", toy.stage(task, data=data, batch_size=2))
    assert max(setup.work.dataset.rejected_lengths) == 64  # type: ignore[attr-defined]


def test_a_model_of_another_kind_is_refused(task: Path, tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=1, num_labels=3)
    GPT2ForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    byte_tokenizer().save_pretrained(tmp_path / "classifier")
    with pytest.raises(ModelError, match="it is a classifier of 3 labels, not of one"):
        toy.prepared(tmp_path / "run", toy.stage(task, model=str(tmp_path / "classifier")))


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"epochs": 1.0}, "both steps and epochs"),
        ({"steps": None}, "neither steps nor epochs"),
    ],
)
def test_exactly_one_of_steps_and_epochs(
    task: Path, tmp_path: Path, fields: dict[str, Any], what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        toy.run_stage(tmp_path, toy.stage(task, **fields))
