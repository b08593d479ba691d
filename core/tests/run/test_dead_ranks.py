"""A process of several that dies, fails or hangs ends the run; the message says which one and where."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

REWARD = '''
import os, signal, threading, time


def _armed():
    """True once, in rank 1, from its second step on."""
    global calls
    calls = globals().get("calls", 0) + 1
    return os.environ.get("RANK") == "1" and calls == 9


def killed(prompt, response):
    if _armed():
        os.kill(os.getpid(), signal.SIGKILL)
    return float(len(response))


def hangs_for_ever(prompt, response):
    if _armed():
        open("hanging", "w").close()
        threading.Event().wait()
    return float(len(response))


def raises(prompt, response):
    if _armed():
        raise ZeroDivisionError("no such score")
    return float(len(response))
'''


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n % 10}+{n // 10}=", "response": str(n)} for n in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


def config(reward: str, **parallel: Any) -> None:
    """Write run.yaml: GRPO whose reward is the function of that name."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    rl = {
        "model": {"init": {"model_type": "llama", **sizes}, "tokenizer": "bytes"},
        "data": "convert",
        "rollout": {"sampling": {"n": 2, "max_new_tokens": 3}},
        "rewards": [{"name": "function", "options": {"path": f"reward.py:{reward}"}, "executor": "inline"}],
        "batch": {"prompts": 4},
        "steps": 50,
    }
    stages = {"convert": {"source": "rows.jsonl"}, "rl": rl}
    document = {"output": "out", "threads": 1, "parallel": parallel, "stages": stages}
    Path("run.yaml").write_text(json.dumps(document))


@dataclass(frozen=True)
class Ended:
    """How a run of two processes ended."""

    code: int
    said: str


def run_two(command: list[str]) -> Ended:
    """The command's end, for which nobody waits as long as the run's own deadline of half an hour."""
    with Path("log.txt").open("w") as log:
        process = subprocess.Popen(
            command, stderr=log, stdout=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        code = process.wait(timeout=300)
    left = [each for each in psutil.process_iter() if _is_ours(each)]
    assert not left, left
    return Ended(code, Path("log.txt").read_text())


def _is_ours(process: psutil.Process) -> bool:
    try:
        return Path(process.cwd()) == Path.cwd() and process.pid != os.getpid()
    except (psutil.Error, FileNotFoundError):
        return False


OURS = [sys.executable, "-m", "posttune", "run", "run.yaml", "--nproc", "2"]
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"),
    *("-m", "posttune", "run", "run.yaml"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "parallel", "said"),
    [("killed", {"data_shard": -1}, "was ended by signal SIGKILL"), ("raises", {}, "no such score")],
)
def test_a_rank_that_ends(reward: str, parallel: dict[str, int], said: str) -> None:
    config(reward, **parallel)
    ended = run_two(OURS)
    assert ended.code == 1
    assert "posttune: error: rank 1, stage 'rl'" in ended.said
    assert said in ended.said
    assert ended.said.count("posttune: error") == 1


@pytest.mark.slow
def test_a_rank_that_hangs() -> None:
    config("hangs_for_ever", deadline_s=45)
    ended = run_two(OURS)
    assert Path("hanging").exists()
    assert ended.code == 1
    assert "stacks of rank 1" in ended.said
    assert "in hangs_for_ever" in ended.said
    assert "posttune: error: rank 0, stage 'rl'" in ended.said
    assert "meanwhile" in ended.said
    assert "rank 1: stage 'rl', in reward_wait" in ended.said


@pytest.mark.slow
def test_a_rank_that_raises_under_plain_torchrun() -> None:
    config("raises")
    ended = run_two(TORCHRUN)
    assert ended.code == 1
    assert "no such score" in ended.said
    assert "rank: 1" in ended.said.replace("rank      : 1", "rank: 1")
