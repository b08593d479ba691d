"""``posttune score``: the shapes that others script against, and what it refuses."""

from __future__ import annotations

import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from posttune.cli.main import main
from posttune.cli.score_report import bins, histogram

ROWS = [
    {"prompt": "2+2=", "response": "#### 4", "reference": "4", "topic": "sums"},
    {"prompt": "2+3=", "response": "#### 6", "reference": 5, "topic": "sums"},
    {"prompt": "none", "response": "", "reference": ["7", "8"], "topic": "odd"},
]
SHAPE = {
    *("mean", "std", "min", "max", "scored", "unscorable", "timeouts", "errors"),
    *("seconds_p50", "seconds_p95", "seconds_max"),
}


@pytest.fixture
def answers(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def fn(tmp_path):
    def make(code: str) -> str:
        path = tmp_path / "fn.py"
        path.write_text(code)
        return "function:" + json.dumps({"path": f"{path}:f"})

    return make


def run(capsys, *args: object) -> tuple[int, str, str]:
    code = main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return code, out, err


def score(capsys, *args: object) -> dict:
    code, out, err = run(capsys, "score", *args, "--json")
    assert code == 0, err
    return json.loads(out)


def test_the_document_has_its_shape(capsys, answers):
    got = score(
        capsys,
        "--reward",
        "gsm8k",
        "--reward",
        'chars=length:{"limit": 6, "unit": "characters"}',
        "--input",
        answers,
    )
    assert got.keys() == {"rewards"}
    assert list(got["rewards"]) == ["gsm8k", "chars"]
    assert all(values.keys() == SHAPE for values in got["rewards"].values())
    gsm8k = got["rewards"]["gsm8k"]
    assert (gsm8k["mean"], gsm8k["min"], gsm8k["max"]) == (pytest.approx(1 / 3), 0.0, 1.0)
    assert gsm8k["std"] == pytest.approx(math.sqrt(2) / 3)
    assert (gsm8k["scored"], gsm8k["unscorable"], gsm8k["timeouts"], gsm8k["errors"]) == (3, 0, 0, 0)


def test_the_output_has_a_column_a_reward_and_nan_where_unscorable(capsys, answers, fn, tmp_path):
    reward = fn("def f(response, topic): return None if topic == 'odd' else {'long': len(response), 'x': 1}")
    out = tmp_path / "deep" / "out.parquet"
    got = score(capsys, "--reward", reward, "--reward", "gsm8k", "--input", answers, "--output", out)
    assert (got["rewards"]["function"]["scored"], got["rewards"]["function"]["unscorable"]) == (2, 1)
    assert got["rewards"]["function"]["dimensions"] == {"function/long": 6.0, "function/x": 1.0}
    table = pq.read_table(out).to_pydict()
    assert table["gsm8k"] == [1.0, 0.0, 0.0]
    assert table["function"][:2] == [7.0, 7.0]
    assert math.isnan(table["function"][2])
    assert table["function/long"][:2] == [6.0, 6.0]
    assert table["sample"] == ["answers.jsonl:1", "answers.jsonl:2", "answers.jsonl:3"]
    assert table["response"] == ["#### 4", "#### 6", ""]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_keys_of_other_names_and_every_kind_of_file(capsys, tmp_path, kind):
    rows = [{"q": "2+2=", "out": {"text": f"#### {n}"}, "gold": "4"} for n in (4, 5)]
    path = tmp_path / f"answers.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows)))
    keys = ("--prompt-key", "q", "--response-key", "out.text", "--reference-key", "gold")
    got = score(capsys, "--reward", "gsm8k", "--input", path, *keys)
    assert got["rewards"]["gsm8k"]["mean"] == 0.5


def test_the_prompt_reaches_the_reward(capsys, answers, fn):
    got = score(
        capsys,
        "--reward",
        fn("def f(prompt, response): return len(prompt)"),
        "--input",
        answers,
        "--prompt-key",
        "topic",
    )
    assert (got["rewards"]["function"]["min"], got["rewards"]["function"]["max"]) == (3.0, 4.0)


def test_the_rollouts_of_a_run_bring_their_tokens(capsys, tmp_path):
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    for step in (1, 2):
        rows = {
            "step": [step] * 2,
            "prompt_id": ["0", "0"],
            "prompt": ["2+2="] * 2,
            "completion": ["#### 4", "#### 5"],
            "completion_ids": pa.array([[5] * step, [6] * 4], pa.list_(pa.int32())),
            "logprobs": pa.array([None, None], pa.list_(pa.float32())),
            "finish_reason": ["stop", "length"],
            "weight_version": [0, 0],
            "reward": [1.0, 0.0],
            "reference": ["4", "4"],
        }
        pq.write_table(pa.table(rows), tmp_path / "run" / "rollouts" / f"step_{step:06d}.parquet")
    for source in (tmp_path / "run", tmp_path / "run" / "rollouts"):
        got = score(capsys, "--reward", "gsm8k", "--reward", 'length:{"limit": 2}', "--input", source)
        assert got["rewards"]["gsm8k"]["scored"] == 4
        assert got["rewards"]["gsm8k"]["mean"] == 0.5
        assert got["rewards"]["length"]["mean"] == 0.5


def test_errors_can_be_left_out(capsys, answers, fn):
    reward = fn("def f(response): return 1 / len(response)")
    code, _, err = run(capsys, "score", "--reward", reward, "--input", answers)
    assert code == 1
    assert "ZeroDivisionError" in err
    assert "reward 'function'" in err
    got = score(capsys, "--reward", reward, "--input", answers, "--on-error", "mask")["rewards"]["function"]
    assert (got["scored"], got["errors"], got["unscorable"]) == (2, 1, 0)


def test_the_table(capsys, answers):
    code, out, _ = run(capsys, "score", "--reward", "gsm8k", "--input", answers)
    assert code == 0
    assert "gsm8k" in out
    assert "0.3333" in out
    assert "3 samples" in out


@pytest.mark.parametrize(("args", "message"), [
    (["--reward", "gsm8", "--input", "{file}"], "did you mean 'gsm8k'"),
    (["--reward", "gsm8k:strict", "--input", "{file}"], "is no JSON object"),
    (["--reward", "gsm8k:[1]", "--input", "{file}"], "is no JSON object"),
    (["--reward", 'gsm8k:{{"mdoe": 1}}', "--input", "{file}"], "did you mean 'mode'"),
    (["--reward", "gsm8k!", "--input", "{file}"], "is not NAME"),
    (["--reward", "gsm8k", "--reward", "gsm8k", "--input", "{file}"], "labelled 'gsm8k'"),
    (["--reward", "gsm8k", "--input", "{file}", "--response-key", "respnse"], "did you mean 'response'"),
    (["--reward", "gsm8k", "--input", "{file}", "--reference-key", "gold"], "no column 'gold'"),
    (["--reward", "gsm8k", "--input", "{dir}/none.jsonl"], "none.jsonl"),
    (["--reward", "gsm8k", "--input", "{empty}"], "empty"),
    (["--reward", "gsm8k", "--input", "{odd}"], "name it with --response-key"),
    (["--reward", "gsm8k", "--input", "{null}"], "{null}:2: response is null"),
    (["--reward", "gsm8k", "--input", "{null}", "--response-key", "other"], "{null}:2: response is "),
    (["--reward", "length:{{\"limit\": 3}}", "--input", "{file}"], "set options.unit to characters"),
    (["--input", "{file}"], "--reward"),
])  # fmt: skip
def test_mistakes_are_the_users(capsys, answers, tmp_path, args, message):
    places = {
        "file": answers,
        "dir": tmp_path,
        "empty": tmp_path / "e",
        "odd": tmp_path / "o",
        "null": tmp_path / "n",
    }
    places["empty"].write_text("")
    places["odd"].write_text('{"text": "x"}\n')
    places["null"].write_text('{"response": "x", "other": "y"}\n{"response": null, "other": true}\n')
    code, out, err = run(capsys, "score", *(arg.format(**places) for arg in args))
    assert code == 2
    assert out == ""
    assert message.format(**places) in err
    assert "Traceback" not in err


def test_help_has_an_example(capsys):
    code, out, _ = run(capsys, "score", "--help")
    assert code == 0
    assert "posttune score --reward gsm8k --input answers.jsonl" in out


def test_histogram():
    assert histogram([0.0, 0.0, 0.0, 1.0]) == "█        ▄"
    assert histogram([1.0, 1.0]) == histogram([]) == histogram([math.nan]) == ""
    assert len(histogram([0.1, 0.2, 0.7, math.nan])) == 10


def test_bins():
    assert bins([]) == bins([math.nan]) == {"edges": [], "counts": []}
    assert bins([2.0, 2.0]) == {"edges": [2.0, 2.0], "counts": [2]}
    found = bins([0.0, 0.1, 0.5, 1.0, math.nan])
    assert len(found["edges"]) == 11
    assert found["counts"] == [1, 1, 0, 0, 0, 1, 0, 0, 0, 1]


STAGE = """
output: run
stages:
  judge:
    kind: {kind}
    model: m
    data: d
    rewards:
{rewards}
{more}
"""


@pytest.fixture
def config(tmp_path):
    def make(name: str, *rewards: str, kind: str = "rl", more: str = "    steps: 1") -> str:
        path = tmp_path / f"{name}.yaml"
        lines = "\n".join(f"      - {each}" for each in rewards)
        path.write_text(STAGE.format(kind=kind, rewards=lines, more=more))
        return str(path)

    return make


def test_the_rewards_and_the_manager_of_a_configuration(capsys, answers, fn, config):
    fn("def f(response): return len(response) / 6")
    manager = "    steps: 1\n    reward_manager: {name: gated, options: {gate: gsm8k}}"
    mine = config("mine", "{name: gsm8k}", "{name: function, options: {path: 'fn.py:f'}}", more=manager)
    got = score(capsys, "--config", mine, "--input", answers)
    assert list(got["rewards"]) == ["gsm8k", "function"]
    assert got["configurations"] == {"mine": {"mean": pytest.approx(2 / 3), "scored": 3, "unscorable": 0}}
    alone = config("alone", "{name: gsm8k}", kind="evaluate", more="")
    assert score(capsys, "--config", f"{alone}:judge", "--input", answers)["configurations"]["alone"][
        "mean"
    ] == pytest.approx(1 / 3)


def test_two_configurations_are_compared(capsys, answers, fn, config, tmp_path):
    reward = fn("def f(response): return None if not response else 1")
    a = config("a", "{name: gsm8k}")
    b = config("b", "{name: function, options: {path: 'fn.py:f'}}")
    args = ("--config", a, "--config", b, "--input", answers, "--disagreements", 5)
    out = tmp_path / "out.parquet"
    got = score(capsys, *args, "--output", out)
    assert list(got["rewards"]) == ["a/gsm8k", "b/function"]
    found = got["disagreements"]
    assert found["between"] == ["a", "b"]
    assert (found["compared"], found["differing"], found["first_higher"]) == (3, 2, 0)
    assert (found["second_higher"], found["scored_by_one"]) == (1, 1)
    assert [each["sample"] for each in found["samples"]] == ["answers.jsonl:3", "answers.jsonl:2"]
    assert found["samples"][1]["scores"] == [0.0, 1.0]
    assert pq.read_table(out).to_pydict()["a"] == [1.0, 0.0, 0.0]
    code, text, _ = run(capsys, "score", *args)
    assert code == 0
    assert "2 of 3 samples differ" in text
    pair = score(capsys, "--reward", "gsm8k", "--reward", reward, "--input", answers, "--disagreements", 1)[
        "disagreements"
    ]
    assert (pair["between"], pair["differing"], len(pair["samples"])) == (["gsm8k", "function"], 2, 1)


def test_slow_samples_and_histograms(capsys, answers, fn):
    reward = fn(
        "import time\ndef f(response): time.sleep(0.05 * (response == '#### 6')); return len(response)"
    )
    args = ("--reward", reward, "--input", answers, "--slowest", 2, "--histogram")
    got = score(capsys, *args)
    slow = got["slowest"]["function"]
    assert slow[0]["sample"] == "answers.jsonl:2"
    assert slow[0]["seconds"] >= 0.05
    assert len(slow) == 2
    assert got["histograms"]["function"]["counts"][-1] == 2
    code, text, _ = run(capsys, "score", *args)
    assert code == 0
    assert "slowest samples" in text
    assert "█" in text


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_samples_that_hang_are_counted(capsys, answers, fn, executor):
    reward = fn("import time\ndef f(response): time.sleep(0 if response else 100); return 1")
    options = ("--executor", executor, "--timeout", 0.3, "--workers", 2)
    got = score(capsys, "--reward", reward, "--input", answers, *options)["rewards"]["function"]
    assert (got["scored"], got["timeouts"], got["unscorable"], got["errors"]) == (2, 1, 0, 0)
    assert got["seconds_max"] >= 0.3


@pytest.mark.parametrize(("args", "message"), [
    (["--input", "{file}"], "name a reward with --reward, or a configuration with --config"),
    (["--input", "{file}", "--reward", "gsm8k", "--disagreements", "3"], "give a second"),
    (["--input", "{file}", "--config", "{config}:jugde"], "did you mean 'judge'"),
    (["--input", "{file}", "--config", "{config}", "--config", "{config}"], "two configurations are called"),
    (["--input", "{file}", "--config", "none.yaml"], "none.yaml"),
])  # fmt: skip
def test_mistakes_with_configurations(capsys, answers, config, args, message):
    path = config("c", "{name: gsm8k}")
    code, _, err = run(capsys, "score", *(arg.format(file=answers, config=path) for arg in args))
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_a_place_that_no_file_can_have_is_refused_before_scoring(capsys, answers, fn, tmp_path):
    ran = tmp_path / "ran"
    reward = fn(f"def f(response):\n    open({str(ran)!r}, 'w').close()\n    return 1.0")
    (tmp_path / "file").write_text("")
    for place, message in (
        (tmp_path, r"is a folder; name a file"),
        (tmp_path / "file" / "scores.parquet", "is a file, not a folder"),
    ):
        code, _, err = run(capsys, "score", "--reward", reward, "--input", answers, "--output", place)
        assert code == 2
        assert message in " ".join(err.split())
    assert not ran.exists()
    code, _, err = run(
        capsys, "score", "--reward", reward, "--input", answers, "--output", tmp_path / "new" / "s.parquet"
    )
    assert code == 0, err
    assert ran.exists()
