"""The tasks as data, the scorers as a reward, and what is denied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from posttune.cli.main import main
from posttune.config.models import RewardRef
from posttune.errors import DataError, PluginOptionsError, UserError
from posttune.facade import Rewards, build_rewards
from posttune.types import Sample
from posttune_reasoning_gym import DENIED, ReasoningGymReward

pytest.importorskip("reasoning_gym")

from posttune_reasoning_gym import _tasks


def rows(task: str, size: int = 3, **config: Any) -> list[dict[str, Any]]:
    return list(_tasks.rows(task, size, 7, config, _tasks.SUFFIX))


def sample(row: dict[str, Any], response: str, name: str = "s") -> Sample:
    return Sample(name, 0, row["prompt"], response, row["reference"], row)


def reward(executor: str = "inline", timeout: float | None = None, **options: Any) -> Rewards:
    ref = RewardRef(
        name="reasoning_gym",
        executor=executor,
        timeout=timeout,
        workers=1 if executor == "process" else None,
        options=options,
    )
    return build_rewards([ref])


@pytest.mark.parametrize(
    "task", ["basic_arithmetic", "leg_counting", "rubiks_cube", "graph_color", "caesar_cipher"]
)
def test_the_own_answer_is_right_and_another_is_wrong(task: str) -> None:
    for row in rows(task):
        if row["reference"]:
            assert ReasoningGymReward().compute_reward(**row) == 1.0
        nonsense = {**row, "response": "<answer>surely not this</answer>"}
        assert ReasoningGymReward().compute_reward(**nonsense) < 0.5


def test_only_the_last_tags_count() -> None:
    (row,) = rows("basic_arithmetic", 1)
    right = row["response"]
    texts = [
        f"<answer>no</answer> or {right}",
        f"{right} or <answer>no</answer>",
        row["reference"],
        "",
        "<answer>",
    ]
    found = reward().score([sample(row, text) for text in texts])["reasoning_gym"]
    assert found[0] == 1.0
    assert found[1] < 0.1
    assert found[2:] == [0.0, 0.0, 0.0]
    assert reward(answer="whole").score([sample(row, row["reference"])]) == {"reasoning_gym": [1.0]}


@pytest.mark.slow
def test_every_task_that_is_not_denied_scores_its_own_answer() -> None:
    for task in sorted(set(_tasks.names()) - set(DENIED)):
        (row,) = rows(task, 1)
        value = ReasoningGymReward().compute_reward(**row)
        assert 0.0 <= value <= 1.0, task
        if row["reference"]:
            assert value > 0.9, task


def test_a_problem_that_comes_out_differently_is_not_scored_as_another() -> None:
    (row,) = rows("rubiks_cube", 1)
    args = json.loads(row["task_args"])
    args.pop("entry", None)
    changed = json.dumps(args | {"digest": "0" * 16})
    with pytest.raises(DataError, match="came out differently this time"):
        ReasoningGymReward().compute_reward(**{**row, "task_args": changed, "response": "<answer>x</answer>"})


@pytest.mark.parametrize("args", ["", "{}", "[]", '{"size": 1}', "nonsense"])
def test_damaged_data_is_named(args: str) -> None:
    with pytest.raises(DataError, match=r"basic_arithmetic.*cannot be read"):
        ReasoningGymReward().compute_reward("", "<answer>1</answer>", task="basic_arithmetic", task_args=args)
    with pytest.raises(DataError, match="names no task"):
        ReasoningGymReward().compute_reward("", "1")


@pytest.mark.parametrize("task", DENIED)
def test_the_ten_are_denied_unless_named(task: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    attack = f"<answer>__import__('pathlib').Path({str(marker)!r}).write_text('x')</answer>"
    row = {"prompt": "", "reference": "", "task": task, "task_args": "{}"}
    with pytest.raises(UserError, match=f"the task '{task}' is denied"):
        reward().score([sample(row, attack)])
    with pytest.raises(UserError, match="it runs only in a process of its own"):
        reward(allow=[task])
    with pytest.raises(UserError, match="scored only in a worker process"):
        ReasoningGymReward(allow=[task]).compute_reward("", attack, task=task, task_args="{}")
    assert not marker.exists()


@pytest.mark.slow
def test_an_allowed_task_runs_without_network_files_or_processes(tmp_path: Path) -> None:
    (row,) = rows("countdown", 1)
    marker, port = tmp_path / "ran", 9
    attacks = [
        f"__import__('pathlib').Path({str(marker)!r}).write_text('x')",
        f"__import__('socket').create_connection(('127.0.0.1', {port}), 1)",
        f"__import__('subprocess').run(['touch', '{marker}'])",
        f"__import__('os').system('touch {marker}')",
        "'x' * 10**11",
    ]
    rewards = reward("process", 20.0, allow=["countdown"])
    batch = [sample(row, row["response"], "good")]
    batch += [sample(row, f"<answer>{text}</answer>", f"bad{i}") for i, text in enumerate(attacks)]
    found = rewards.score([*batch, batch[0]])["reasoning_gym"]
    assert found[0] == found[-1] == 1.0
    assert all(value is None or value < 0.5 for value in found[1:-1])
    assert not marker.exists() or not marker.read_bytes()


@pytest.mark.slow
def test_an_answer_that_takes_for_ever_is_killed() -> None:
    (row,) = rows("polynomial_multiplication", 1)
    rewards = reward("process", 10.0, allow=["polynomial_multiplication"])
    rewards.score([sample(row, row["response"], "warm")])
    hanging = sample(row, "<answer>9**9**9**9</answer>", "hangs")
    found = rewards.score([hanging, sample(row, row["response"], "good")])["reasoning_gym"]
    assert found[0] is None or found[0] < 0.5


def test_what_is_not_denied_needs_no_permission() -> None:
    with pytest.raises(PluginOptionsError, match="'basic_arithmetic' is not denied"):
        reward(allow=["basic_arithmetic"])


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["reasoning-gym", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_writes_what_convert_reads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    to = tmp_path / "deep" / "tasks.jsonl"
    code, out, err = run(
        capsys, "basic_arithmetic", "countdown", "--size", 4, "--seed", 3, "--to", to, "--json"
    )
    assert code == 0, err
    assert json.loads(out) == {"file": str(to), "rows": 8, "tasks": ["basic_arithmetic", "countdown"]}
    assert "denies 'countdown'" in err
    assert [path.name for path in to.parent.iterdir()] == ["tasks.jsonl"]
    first = to.read_text()
    assert run(capsys, "basic_arithmetic", "countdown", "--size", 4, "--seed", 3, "--to", to)[0] == 0
    assert to.read_text() == first
    assert main(["data", "convert", str(to), "--to", str(tmp_path / "data")]) == 0
    capsys.readouterr()
    assert (
        main(["score", "--reward", "reasoning_gym", "--input", str(to), "--on-error", "mask", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)["rewards"]["reasoning_gym"]
    assert (found["scored"], found["mean"], found["errors"]) == (4, 1.0, 4)


@pytest.mark.parametrize(("arguments", "words"), [
    (["basic_arithmetik", "--to", "x.jsonl"], "did you mean 'basic_arithmetic'"),
    (["basic_arithmetic"], "--to FILE"),
    (["--to", "x"], "name a task"),
    (["basic_arithmetic", "--to", "x", "--config", "[]"], "no JSON object"),
    (["basic_arithmetic", "--to", "x", "--config", "{\"min_term\": 1}"], "refuses its options"),
    (["basic_arithmetic", "--to", "."], "is a folder"),
])  # fmt: skip
def test_mistakes_are_the_users(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert words in err
    assert list(tmp_path.iterdir()) == []


def test_the_list_says_what_is_denied(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--list", "--json")
    assert code == 0
    found = {each["task"]: each["denied"] for each in json.loads(out)}
    assert len(found) > 100
    assert {name for name, denied in found.items() if denied} == set(DENIED)
