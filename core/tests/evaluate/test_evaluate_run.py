"""Evaluation of a real (tiny) model: by call, by command, as a stage, on two ranks."""

from __future__ import annotations

import json
import os
import socket
from functools import cache
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch.multiprocessing as mp
from posttune.cli.main import main
from posttune.config.load import load_config
from posttune.config.models import ModelConfig, PluginRef
from posttune.data.conversion import ConvertRequest, convert
from posttune.data.dataset import SampleDataset
from posttune.distributed.ranks import Ranks
from posttune.errors import DataError, Interrupted, ModelError
from posttune.evaluate.evaluate import evaluate
from posttune.evaluate.report import Evaluation
from posttune.facade import build_rewards, build_rollout
from posttune.models.load import LoadedModel, load_model
from posttune.run.runner import run
from posttune.testing.tiny import tiny_model
from posttune.types import RolloutContext, Sampling
from transformers import AutoModelForCausalLM

REWARD = """
def odd(prompt, response, reference=None, digits=0):
    return len(response) % 2
def always(response):
    return 1.0
def reference_is_answer(response, reference):
    return float(reference.isdigit())
"""
ROWS = 10


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a model, a dataset of ten rows and rewards."""
    folder = tmp_path_factory.mktemp("evaluate")
    tiny_model(folder / "model")
    sharpen(folder / "model")
    rows = [{"prompt": f"{i}+{i}=", "response": str(2 * i), "digits": len(str(2 * i))} for i in range(ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    convert(ConvertRequest([folder / "rows.jsonl"], folder / "data", tokenizer=folder / "model"))
    (folder / "fn.py").write_text(REWARD)
    return folder


def sharpen(folder: Path) -> None:
    """Let the random model prefer some tokens to others."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.get_output_embeddings().weight.data.mul_(15)
    model.save_pretrained(folder)


@cache
def loaded_from(place: Path) -> LoadedModel:
    return load_model(ModelConfig(path=str(place / "model")), place / "model", seed=0)


def reward(place: Path, name: str = "odd") -> PluginRef:
    return PluginRef(name="function", label=name, options={"path": f"{place}/fn.py:{name}"})


def measure(
    place: Path, sampling: Sampling, limit: int | None = None, ranks: Ranks | None = None, **more
) -> Evaluation:
    loaded = loaded_from(place)
    dataset = SampleDataset(place / "data")
    rewards = build_rewards([reward(place), reward(place, "always")])
    with build_rollout(PluginRef(name="hf")) as engine:
        engine.start(RolloutContext(None, loaded.tokenizer, "float32", "cpu", 0, 64, live_model=loaded.model))
        return evaluate(engine, loaded.tokenizer, dataset, rewards, sampling, limit, ranks=ranks, **more)


SAMPLED = Sampling(n=3, max_new_tokens=6, eos_ids=frozenset(range(3, 60)))


def test_every_prompt_is_answered_and_judged(place):
    got = measure(place, SAMPLED)
    assert (got.n, got.k) == (ROWS, 3)
    table = got.table().to_pydict()
    assert len(table["completion"]) == 3 * ROWS
    odd = [len(text) % 2 for text in table["completion"]]
    assert table["reward/odd"] == odd
    assert got.accuracy == pytest.approx(sum(odd) / len(odd))
    assert got.rewards == {"odd": pytest.approx(got.accuracy), "always": 1.0}
    assert table["prompt"][::3] == [f"{i}+{i}=" for i in range(ROWS)]
    assert table["reference"][3:6] == ["2"] * 3, "the response is the reference where none is mapped"
    assert got.tokens_per_completion == pytest.approx(sum(table["tokens"]) / (3 * ROWS))
    assert got.truncated_fraction == table["finish_reason"].count("length") / (3 * ROWS)
    assert got.tokens_per_s > 0


def test_a_limit_takes_the_first_rows_and_changes_none_of_their_answers(place):
    whole, part = measure(place, SAMPLED), measure(place, SAMPLED, limit=4)
    assert part.n == 4
    assert (
        part.table().column("completion").to_pylist() == whole.table().column("completion").to_pylist()[:12]
    )
    assert measure(place, SAMPLED, limit=99).n == ROWS


def test_another_seed_gives_other_answers(place):
    first, other = (
        measure(place, SAMPLED, seed=seed).table().column("completion").to_pylist() for seed in (0, 1)
    )
    assert first != other


def test_by_a_column(place):
    got = measure(place, SAMPLED, by=["digits"])
    assert [(value, part.n) for value, part in got.by["digits"].items()] == [("1", 5), ("2", 5)]
    parts = got.by["digits"].values()
    assert sum(part.accuracy * part.n for part in parts) / ROWS == pytest.approx(got.accuracy)
    with pytest.raises(DataError, match=r"no column 'digts' .*\(did you mean 'digits'\?\)"):
        measure(place, SAMPLED, by=["digts"])


def test_progress_is_told_and_may_stop_it(place, monkeypatch):
    monkeypatch.setattr("posttune.evaluate.evaluate.CHUNK", 4)
    told: list[tuple[int, int]] = []
    chunked = measure(place, SAMPLED, progress=lambda done, total: told.append((done, total)))
    assert told == [(4, 10), (8, 10), (10, 10)]
    assert chunked.table().equals(measure(place, SAMPLED).table())

    def stop(done: int, total: int) -> None:
        raise Interrupted("enough")

    with pytest.raises(Interrupted):
        measure(place, SAMPLED, progress=stop)


@pytest.mark.slow
def test_two_ranks_share_the_prompts_and_get_the_whole_result(place):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_rank, args=(port, place), nprocs=2, join=True)
    alone = measure(place, SAMPLED).as_json()
    for rank in range(2):
        got = json.loads((place / f"rank{rank}.json").read_text())
        timing = {"tokens_per_s"}
        assert {k: v for k, v in got.items() if k not in timing} == {
            k: v for k, v in alone.items() if k not in timing
        }


def _rank(rank: int, port: int, place: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    ranks = Ranks.current("cpu", deadline_s=60)
    got = measure(place, SAMPLED, ranks=ranks)
    assert len(got.samples) == 3 * ROWS // 2
    (place / f"rank{rank}.json").write_text(json.dumps(got.as_json()))
    ranks.close()


def command(capsys, *args: object) -> tuple[int, str, str]:
    code = main(["evaluate", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


def arguments(place: Path, name: str = "odd") -> list[object]:
    options = json.dumps({"path": f"{place}/fn.py:{name}"})
    return [
        place / "model",
        "--data",
        place / "data",
        "--reward",
        f"function:{options}",
        "--max-new-tokens",
        4,
    ]


def test_the_command(place, capsys, tmp_path):
    more = ["--n", 2, "--temperature", 0.8, "--limit", 6, "--by", "digits", "--output", tmp_path / "out"]
    code, out, err = command(capsys, *arguments(place), *more, "--json")
    assert code == 0, err
    got = json.loads(out)
    assert {"accuracy", "ci95", "n", "mean@k", "pass@k", "tokens_per_s", "by"} <= got.keys()
    assert (got["n"], got["k"]) == (6, 2)
    assert got["ci95"][0] <= got["accuracy"] <= got["ci95"][1]
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text()) == got
    assert pq.read_table(tmp_path / "out" / "samples.parquet").num_rows == 12


def test_the_command_is_greedy_and_repeatable_by_default(place, capsys):
    results = [json.loads(command(capsys, *arguments(place), "--json")[1]) for _ in range(2)]
    for result in results:
        del result["tokens_per_s"]
    assert results[0] == results[1]
    assert results[0]["mean@k"] == results[0]["pass@k"] == results[0]["accuracy"]


def test_options_of_the_command_reach_the_engine(place, capsys):
    sampled = [*arguments(place), "--temperature", 1.0, "--device", "cpu", "--json"]
    answers = []
    for options in (["--seed", 0], ["--seed", 1], ["--seed", 0, "--dtype", "bfloat16"]):
        folder = place / "-".join(map(str, options))
        assert command(capsys, *sampled, *options, "--output", folder)[0] == 0
        answers.append(pq.read_table(folder / "samples.parquet").column("completion").to_pylist())
    assert answers[0] != answers[1]
    assert answers[0] != answers[2], "bfloat16 rounds"


def test_the_command_shows_a_table(place, capsys):
    code, out, _ = command(
        capsys, *arguments(place, "always"), "--n", 2, "--temperature", 1, "--by", "digits"
    )
    assert code == 0
    assert "1.000" in out
    assert "digits = 2" in out
    assert "pass@2 1" in out


@pytest.mark.parametrize(("change", "message"), [
    ({0: "{place}/nothing"}, "nothing"),
    ({2: "{place}/rows.jsonl"}, "convert"),
    ({2: "{place}/nowhere"}, "no such dataset"),
    ({4: "gsm8"}, "did you mean 'gsm8k'"),
    ({6: "5000"}, "the model takes 2048"),
    ({7: ["--by", "digts"]}, "did you mean 'digits'"),
    ({7: ["--backend", "hff"]}, "did you mean 'hf'"),
    ({7: ["--n", "0"]}, "--n"),
])  # fmt: skip
def test_mistakes_of_the_user(place, capsys, change, message):
    args = [*arguments(place), ""]
    for position, value in change.items():
        args[position] = value.format(place=place) if isinstance(value, str) else value
    flat = [part for arg in args for part in (arg if isinstance(arg, list) else [arg]) if part != ""]
    code, out, err = command(capsys, *flat)
    assert code == 2
    assert out == ""
    assert message in err


def config(place: Path, folder: Path, **stage: object) -> dict[str, object]:
    return {
        "output": str(folder),
        "device": "cpu",
        "observers": [{"name": "jsonl"}],
        "stages": {
            "check": {
                "kind": "evaluate",
                "model": str(place / "model"),
                "data": str(place / "data"),
                "rewards": [reward(place).model_dump(), reward(place, "reference_is_answer").model_dump()],
                "rollout": {"name": "hf", "sampling": {"max_new_tokens": 4, "temperature": 0.0}},
                **stage,
            }
        },
    }


def test_the_stage(place, tmp_path):
    (result,) = run(load_config(config(place, tmp_path / "run", by=["digits"])))
    assert result.metrics["n"] == ROWS
    assert result.metrics["rewards"]["reference_is_answer"] == 1.0
    assert result.output == tmp_path / "run" / "evaluations" / "check"
    assert json.loads((result.output / "evaluation.json").read_text()) == result.metrics
    assert pq.read_table(result.output / "samples.parquet").num_rows == ROWS
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["val/accuracy"] == result.metrics["accuracy"]
    assert result.metrics["by"]["digits"]["1"]["n"] == 5


def test_the_stage_takes_a_new_model_and_a_limit(place, tmp_path):
    model = {
        "init": {"model_type": "llama", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
                 "num_attention_heads": 2, "num_key_value_heads": 2},
        "tokenizer": "bytes",
    }  # fmt: skip
    data = {"path": str(place / "data"), "limit": 3}
    (result,) = run(load_config(config(place, tmp_path / "run", model=model, data=data)))
    assert result.metrics["n"] == 3


def test_the_stage_refuses_what_the_model_cannot_hold(place, tmp_path):
    rollout = {"name": "hf", "sampling": {"max_new_tokens": 5000, "temperature": 0.0}}
    with pytest.raises(ModelError, match="the model takes 2048"):
        run(load_config(config(place, tmp_path / "run", rollout=rollout)))


def test_a_checkpoint_and_its_run_are_models(place, tmp_path, capsys):
    stages = {
        "train": {
            "kind": "sft",
            "model": str(place / "model"),
            "data": str(place / "data"),
            "batch_size": 2,
            "steps": 1,
            "optimizer": {"lr": 0.0},
        }
    }
    run(load_config({**config(place, tmp_path / "run"), "stages": stages}))
    wanted = json.loads(command(capsys, *arguments(place), "--json")[1])
    for model in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "global_step_1"):
        code, out, err = command(capsys, model, *arguments(place)[1:], "--json")
        assert code == 0, err
        assert json.loads(out)["accuracy"] == wanted["accuracy"]
