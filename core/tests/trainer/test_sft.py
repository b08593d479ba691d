"""SFT: the loss covers response and EOS, and nothing depends on how it is computed."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_toy as toy
from posttune.data.conversion import ConvertRequest, convert
from posttune.data.dataset import SampleDataset
from posttune.distributed.ranks import Ranks
from posttune.errors import ConfigError, DataError
from posttune.trainer.loop import Position
from posttune.trainer.sft import SftWork


def expected_loss(task: Path, rows: list[int]) -> float:
    """The mean of -log p over response and EOS, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(task / "model")
    dataset, total, count = SampleDataset(task / "data"), 0.0, 0
    eos = 2
    for row in (dataset[index] for index in rows):
        ids, start = row["input_ids"], len(row["prompt_ids"])
        assert ids[-1] == eos
        logp = model(torch.tensor([ids])).logits[0].detach().double().log_softmax(-1)
        places = range(start, len(ids))
        total -= sum(float(logp[place - 1, ids[place]]) for place in places)
        count += len(places)
    return total / count


def test_loss_is_the_token_mean_over_response_and_eos(task: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        setup = toy.prepared(tmp_path, toy.sft(task), stack)
        assert isinstance(setup.work, SftWork)
        rows = setup.work.sampler.indices(0, 8)
        (found,) = toy.take_steps(setup, 1)
    assert found["loss"] == pytest.approx(expected_loss(task, rows), rel=1e-5)


@pytest.mark.parametrize("packing", [{"micro_batch_tokens": 8}, {"micro_batch_tokens": 64, "row_tokens": 20}])
def test_any_split_over_micro_batches_gives_the_same(
    task: Path, tmp_path: Path, packing: dict[str, int]
) -> None:
    found = []
    for options in ({}, {"packing": packing}):
        with ExitStack() as stack:
            setup = toy.prepared(tmp_path, toy.sft(task, **options), stack)
            found.append((toy.take_steps(setup, 3), toy.weights(setup)))
    (whole, first), (split, second) = found
    for one, other in zip(whole, split, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    for name in first:
        assert torch.allclose(first[name], second[name], atol=1e-5)


def test_the_loss_falls_and_a_run_leaves_what_it_promises(task: Path, tmp_path: Path) -> None:
    stage = toy.sft(task, steps=30, optimizer={"lr": 1e-2, "warmup_steps": 2})
    result = toy.run_stage(tmp_path, stage)
    lines = toy.metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert lines[-1]["loss"] < 0.6 * lines[0]["loss"]
    assert lines[0]["lr"] == pytest.approx(5e-3)
    keys = {"stage", "step", "global_step", "time/step_s", "time/update_s", "loss", "grad_norm", "lr"}
    keys |= {"tokens_per_s", "update/padding_fraction", "update/tokens_per_row", "update/attention_waste"}
    assert keys | {"memory/peak_mb"} <= lines[0].keys()
    assert result.output == tmp_path / "models" / "sft"
    assert (result.output / "model.safetensors").is_file()
    assert (tmp_path / "checkpoints" / "global_step_30" / "COMPLETE").is_file()
    assert result.metrics["steps"] == 30


def test_a_learning_rate_of_zero_leaves_the_weights(task: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        setup = toy.prepared(tmp_path, toy.sft(task, optimizer={"lr": 0.0}), stack)
        before = toy.weights(setup)
        toy.take_steps(setup, 2)
        after = toy.weights(setup)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_epochs_become_steps_and_every_row_is_used_once_an_epoch(task: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        setup = toy.prepared(tmp_path, toy.sft(task, steps=None, epochs=1.5), stack)
        assert setup.total_steps == 5  # 24 rows, 8 a step
        assert isinstance(setup.work, SftWork)
        first = setup.work.sampler.indices(0, 24)
    assert sorted(first) == list(range(24))


def test_adapters_alone_are_trained(task: Path, tmp_path: Path) -> None:
    model = {"path": str(task / "model"), "lora": {"rank": 4}}
    with ExitStack() as stack:
        setup = toy.prepared(tmp_path, toy.sft(task, model=model, optimizer={"lr": 1e-2}), stack)
        before = toy.weights(setup)
        found = toy.take_steps(setup, 4)
        after = toy.weights(setup)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all(".lora_" in name for name in moved)
    assert found[-1]["loss"] < found[0]["loss"]


def test_gradient_checkpointing_changes_nothing(task: Path, tmp_path: Path) -> None:
    found = []
    for checkpointing in (False, True):
        model = {"path": str(task / "model"), "gradient_checkpointing": checkpointing}
        with ExitStack() as stack:
            setup = toy.prepared(tmp_path, toy.sft(task, model=model), stack)
            found.append([each["loss"] for each in toy.take_steps(setup, 3)])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_data_without_responses_is_refused(task: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n' * 9)
    data = tmp_path / "data"
    roles = {"prompt": "prompt"}
    convert(ConvertRequest([tmp_path / "rows.jsonl"], data, map=roles, tokenizer=task / "model"))
    with pytest.raises(DataError, match="none of the 8 rows of step 1 has a token to train"):
        toy.run_stage(tmp_path / "run", toy.sft(task, data=str(data)))


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
        toy.run_stage(tmp_path, toy.sft(task, **fields))


def test_every_process_gets_about_as_many_tokens(task: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "response": "2" * (1 if number < 12 else 40)} for number in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    convert(ConvertRequest([tmp_path / "rows.jsonl"], tmp_path / "data", tokenizer=task / "model"))
    stage = toy.sft(task, data={"path": str(tmp_path / "data"), "shuffle": False}, batch_size=24)
    with ExitStack() as stack:
        work = toy.prepared(tmp_path, stage, stack).work
        assert isinstance(work, SftWork)
        shares = [replace(work, ranks=Ranks(rank, 3))._sequences(Position(0, 0, 0)) for rank in range(3)]
        whole = work._sequences(Position(0, 0, 0))
    tokens = [sum(len(sequence.ids) for sequence in share) for share in shares]
    assert tokens[0] == tokens[1] == tokens[2]  # a contiguous third of these rows has none of the long ones
    ids = [list(sequence.ids) for share in shares for sequence in share]
    assert sorted(ids) == sorted(list(sequence.ids) for sequence in whole)
