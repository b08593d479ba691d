"""Runs on a Ray cluster of this machine. What needs no ray is tested everywhere."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from posttune.errors import UserError
from posttune_ray import launch as module
from posttune_ray.cli import main
from posttune_ray.launch import Wanted, first_failure
from posttune_ray.worker import ProcessFailedError, run_process, variables

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'posttune-ray[engine]'"
)
REWARD = """
import os, signal

calls = 0


def longer(prompt, response):
    return float(len(response))


def killed(prompt, response):
    global calls
    calls += 1
    if os.environ["RANK"] == "1" and calls == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return float(len(response))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n % 10}+{n // 10}=", "response": str(n)} for n in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    write_config("longer")
    return tmp_path


def write_config(reward: str, **fields: Any) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    rl = {
        "model": {"init": {"model_type": "llama", **sizes}, "tokenizer": "bytes"},
        "data": "convert",
        "rollout": {"sampling": {"n": 2, "max_new_tokens": 3}},
        "rewards": [{"name": "function", "options": {"path": f"reward.py:{reward}"}}],
        "batch": {"prompts": 4},
        "steps": 2,
        **fields,
    }
    stages = {"convert": {"source": "rows.jsonl"}, "rl": rl}
    Path("run.yaml").write_text(
        json.dumps({"output": "out", "device": "cpu", "threads": 1, "stages": stages})
    )


def test_what_a_process_is_told() -> None:
    told = variables(("10.0.0.1", 29500), 3, 4, 1, gpus=0)
    assert told == {
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
    }
    assert variables(("10.0.0.1", 29500), 3, 4, 1, gpus=1)["LOCAL_RANK"] == "0"


def test_a_process_that_fails_leaves_its_last_words(tmp_path: Path) -> None:
    code = "import os, sys; print('RANK', os.environ['RANK']); sys.exit('no such thing')"
    with pytest.raises(ProcessFailedError, match=r"exit code 1\nRANK 1\nno such thing"):
        run_process([sys.executable, "-c", code], {"RANK": "1"}, str(tmp_path))
    killed = "import os; os.kill(os.getpid(), 9)"
    with pytest.raises(ProcessFailedError, match="SIGKILL"):
        run_process([sys.executable, "-c", killed], {}, str(tmp_path))
    run_process([sys.executable, "-c", "print('fine')"], {}, str(tmp_path))


def test_a_node_that_does_not_see_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailedError, match="same path"):
        run_process([sys.executable, "-c", ""], {}, str(tmp_path / "elsewhere"))


def test_the_first_failure_is_the_one_that_is_no_echo() -> None:
    echo = ProcessFailedError("ended with exit code 1\nConnection closed by peer [127.0.0.1]:1")
    found = first_failure({0: echo, 1: ProcessFailedError("was ended by signal SIGKILL")})
    assert "rank 1" in str(found)
    assert "SIGKILL" in str(found)
    assert "rank 0" in str(first_failure({0: echo}))


def test_without_ray_the_command_says_how_to_get_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert main(["run.yaml", "--nproc", "2"]) == 2
    assert 'pip install "posttune-ray[engine]"' in capsys.readouterr().err
    assert not (place / "out").exists()


def test_a_cluster_that_is_too_small_is_refused_instead_of_waited_for() -> None:
    with pytest.raises(UserError, match="8 processes of 2 CPU need 16, it has 4"):
        module._refuse_small({"CPU": 4.0}, Wanted(8, cpus=2))
    with pytest.raises(UserError, match="1 GPU need 2, it has 0"):
        module._refuse_small({"CPU": 4.0}, Wanted(2, gpus=1))


def run_on_ray(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "posttune_ray", "run.yaml", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=560, check=False)


LOCAL = """
import sys
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from posttune_ray.worker import work

config = {"arguments": ["run", "run.yaml"], "folder": sys.argv[1], "gpus": 0}
trainer = DataParallelTrainer(
    work,
    train_loop_config=config,
    scaling_config=ScalingConfig(num_workers=0),
    run_config=RunConfig(storage_path=sys.argv[1], name="ray"),
)
trainer.fit()
"""


@needs_ray
@pytest.mark.engine
@pytest.mark.slow
def test_one_process_under_ray_train_without_a_cluster(place: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_TRAIN_V2_ENABLED": "1"}
    command = [sys.executable, "-c", LOCAL, str(place)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((place / "out/metrics.jsonl").read_text().splitlines()) == 2


@needs_ray
@pytest.mark.engine
@pytest.mark.slow
def test_two_processes_of_a_cluster(place: Path) -> None:
    done = run_on_ray("parallel.data_shard=-1", "--nproc", "2", "--cpus", "0.5")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (place / "out/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert json.loads((place / "out/environment.json").read_text())["machine"]["world_size"] == 2
    assert (place / "out/models/rl/model.safetensors").exists()
    assert not list(place.glob(".posttune-ray-*"))


@needs_ray
@pytest.mark.engine
@pytest.mark.slow
def test_a_killed_process_ends_the_run(place: Path) -> None:
    write_config("killed")
    done = run_on_ray("--nproc", "2", "--cpus", "0.5")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "posttune-ray: error: rank 1" in done.stderr
    assert "SIGKILL" in done.stderr


@needs_ray
@pytest.mark.engine
@pytest.mark.slow
def test_a_mistake_is_told_before_the_cluster_is_asked(place: Path) -> None:
    done = run_on_ray("rl.bach.prompts=3", "--nproc", "2")
    assert done.returncode == 2
    assert "batch" in done.stderr
    assert not (place / "out").exists()
