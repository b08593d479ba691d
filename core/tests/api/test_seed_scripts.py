"""The scripts that users come with run as they are: no main guard, a reward from __main__, small models."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import api_task
import pytest
import torch
from api_task import comparable
from posttune.checkpoint import dcp, store
from posttune.data.dataset import SampleDataset

ROOT = Path(__file__).parents[3]
COPIES = ROOT / "tests" / "data" / "seeds"
SHARED = ROOT.parent / "shared" / "seeds"
SCRIPTS = ("ppo_minimal.py", "ppo_math.py", "convert_preference.py", "reward_func.py")
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
needs_sympy = pytest.mark.skipif(
    importlib.util.find_spec("posttune_sympy") is None, reason="posttune-sympy is not installed"
)


def script(name: str) -> Path:
    """The script itself where it is at hand, else our copy."""
    return SHARED / name if (SHARED / name).is_file() else COPIES / name


def run(name: str, *arguments: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a script to its end."""
    command = [sys.executable, str(script(name)), *map(str, arguments)]
    done = subprocess.run(
        command, cwd=cwd, env=ENVIRON, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.skipif(not SHARED.is_dir(), reason="the scripts themselves are not at hand")
@pytest.mark.parametrize("name", SCRIPTS)
def test_our_copies_are_true(name: str) -> None:
    assert (COPIES / name).read_text() == (SHARED / name).read_text()


def test_a_whole_ppo_loop_has_at_most_17_lines() -> None:
    tree = ast.parse(script("ppo_minimal.py").read_text())
    code = {node.lineno for part in tree.body[1:] for node in ast.walk(part) if hasattr(node, "lineno")}
    assert len(code) <= 17


@pytest.mark.slow
def test_ppo_minimal(api: Path, tmp_path: Path) -> None:
    done = run("ppo_minimal.py", api / "model", api / "data", cwd=tmp_path)
    *lines, last = done.stdout.splitlines()
    metrics = ast.literal_eval(last)
    assert {"reward", "reward_std", "kl"} <= metrics.keys()
    assert all(re.match(r"PPO step \d+/\d+, reward: -?\d+\.\d{3} ± \d+\.\d{3}", line) for line in lines)
    assert len(lines) == 1  # 10 rows, 16 a step
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@needs_sympy
def test_ppo_math(api: Path, tmp_path: Path) -> None:
    done = run("ppo_math.py", api / "model", api / "raw.jsonl", tmp_path / "out", cwd=tmp_path)
    shown = [line for line in done.stdout.splitlines() if line.startswith("epoch ")]
    assert [line.partition(":")[0] for line in shown] == ["epoch 0", "epoch 1"]
    assert "PPO step 4/4, reward: " in done.stdout
    notices = [line for line in done.stderr.splitlines() if "flash" in line]
    assert len(notices) == 1
    run("ppo_math.py", api / "model", api / "raw.jsonl", tmp_path / "out", cwd=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))  # it went on


RESUMABLE = """
import sys

from posttune import HFModel, PPOTrainer, SampleDataset

model, data, out = sys.argv[1:4]
offset = 1 / 8


def reward(prompt, response):
    return sum(c.islower() for c in response) * offset


trainer = PPOTrainer(
    HFModel(model),
    HFModel(model, is_critic=True),
    reward,
    SampleDataset(data),
    {
        "training": {"batch_size": 4, "num_epochs": 2, "lr": 1e-3, "output_dir": out, "save_every": 1},
        "algorithm": {"kl_coef": 0.1},
        "rollout": {"max_new_tokens": 6},
    },
)
while trainer.epoch < 3:
    metrics = trainer.train_epoch()
    trainer.kl_ctrl.update(kl=metrics["kl"], step=trainer.epoch)
"""


@pytest.mark.slow
def test_a_script_killed_and_run_again_is_bit_exact(api: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RESUMABLE)

    def start(out: str) -> subprocess.Popen[str]:
        command = [sys.executable, "train.py", str(api / "model"), str(api / "data"), out]
        return subprocess.Popen(command, cwd=tmp_path, env=ENVIRON, stderr=subprocess.PIPE, text=True)

    whole, killed = start("a"), start("b")
    while not (tmp_path / "b" / "checkpoints" / "global_step_4" / "COMPLETE").exists():
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    again = start("b")
    for process in (whole, again):
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    ends = [store.latest(tmp_path / name / "checkpoints") for name in "ab"]
    assert [end and end.name for end in ends] == ["global_step_9", "global_step_9"]
    assert contents(ends[0]) == contents(ends[1])


def contents(checkpoint: Path | None) -> dict[str, object]:
    """Tensors of models, optimisers and generators, as bytes; the position, the controller, the metrics."""
    assert checkpoint is not None
    shapes = dcp.shapes(checkpoint / "tensors")
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    dcp.read_into(checkpoint / "tensors", tensors)
    assert any(name.startswith("critic") or "critic" in name for name in tensors)
    state = store.read_state(checkpoint)
    found: dict[str, object] = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
    epoch = {name: comparable(values) for name, values in state["work"]["epoch"].items() if name != "rewards"}
    return found | {
        "position": state["position"],
        "kl": state["work"]["kl_control"],
        "rewards": state["work"]["epoch"]["rewards"],
        "epoch": epoch,
    }


@pytest.mark.slow
def test_convert_preference(api: Path, tmp_path: Path) -> None:
    source = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(5)]
    source.write_text("\n".join(map(json.dumps, rows)))
    run("convert_preference.py", source, tmp_path / "out", api / "model", cwd=tmp_path)
    dataset = SampleDataset(tmp_path / "out")
    assert len(dataset) == 5
    assert (dataset[0]["chosen"], dataset[0]["rejected"]) == ("yes", "no")
    for name in ("meta.json", "tokenizer_config.json", "train.bin"):
        assert (tmp_path / "out" / name).is_file()


def test_reward_func_by_path(api: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(script("reward_func.py").parent))
    from reward_func import reward_func  # type: ignore[import-not-found]

    assert "reward" in api_task.ppo(api, reward_fn=reward_func).train_epoch()
