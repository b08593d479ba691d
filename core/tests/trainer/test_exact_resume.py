"""2N steps equal N, a kill, a resume and N: bit for bit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import trainer_toy as toy
from posttune.data.conversion import ConvertRequest, convert
from posttune.errors import CheckpointError, Interrupted
from posttune.run.stages import InterruptFlag

RUN = """
import json, sys, torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import trainer_toy as toy
toy.run_stage(Path(sys.argv[2]), json.loads(sys.argv[3]))
"""


def start(output: Path, stage: dict[str, Any]) -> subprocess.Popen[bytes]:
    here = str(Path(__file__).parent)
    return subprocess.Popen([sys.executable, "-c", RUN, here, str(output), json.dumps(stage)])


def kill_after(process: subprocess.Popen[bytes], output: Path, step: int) -> None:
    """SIGKILL once the line of ``step`` has been written."""
    deadline = time.monotonic() + 120
    path = output / "metrics.jsonl"
    while not (path.exists() and len(path.read_text().splitlines()) >= step):
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()


def stages(task: Path, kind: str) -> dict[str, Any]:
    """8 steps through 24 rows: the resume lies in the second epoch."""
    checkpoint = {"checkpoint": {"every": 2}}
    if kind == "sft":
        return toy.sft(task, steps=8, **checkpoint)
    return toy.rl(
        task,
        steps=8,
        batch={"prompts": 6, "mini_batches": 2},
        kl={"where": "loss", "coef": 0.05, "target": 0.01, "horizon": 500},
        **checkpoint,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_killed_and_resumed_equals_never_stopped(task: Path, tmp_path: Path, kind: str) -> None:
    stage = stages(task, kind)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    toy.run_stage(whole, stage)
    kill_after(start(parts, stage), parts, 5)
    assert len(toy.metrics(parts)) >= 5
    assert not (parts / "checkpoints" / "global_step_8").exists()
    toy.run_stage(parts, stage, resume=True)
    toy.assert_same_run(whole, parts, 8)


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_interrupted_leaves_a_checkpoint_and_goes_on(task: Path, tmp_path: Path, kind: str) -> None:
    stage = toy.merged(stages(task, kind), {"steps": 4, "checkpoint": {"every": 0}})
    toy.run_stage(tmp_path / "whole", stage)
    flag = InterruptFlag()
    flag.set()
    with pytest.raises(Interrupted, match=r"after step 1 of 4.*global_step_1"):
        toy.run_stage(tmp_path / "parts", stage, interrupt=flag)
    assert [line["step"] for line in toy.metrics(tmp_path / "parts")] == [1]
    toy.run_stage(tmp_path / "parts", stage, resume=True)
    toy.assert_same_run(tmp_path / "whole", tmp_path / "parts", 4)


def interrupted(output: Path, stage: dict[str, Any]) -> None:
    flag = InterruptFlag()
    flag.set()
    with pytest.raises(Interrupted):
        toy.run_stage(output, stage, interrupt=flag)


def test_other_data_is_refused(task: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n' * 9)
    data = tmp_path / "data"
    convert(ConvertRequest([tmp_path / "rows.jsonl"], data, tokenizer=task / "model"))
    stage = toy.sft(task, data=str(data))
    interrupted(tmp_path / "run", stage)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "response": "3"}\n' * 9)
    convert(ConvertRequest([tmp_path / "rows.jsonl"], data, tokenizer=task / "model", overwrite=True))
    with pytest.raises(CheckpointError, match="training data has changed"):
        toy.run_stage(tmp_path / "run", stage, resume=True)


def test_another_configuration_is_refused_and_the_field_named(task: Path, tmp_path: Path) -> None:
    interrupted(tmp_path, toy.sft(task))
    with pytest.raises(CheckpointError, match=r"optimizer\.lr: 0\.001 -> 0\.1"):
        toy.run_stage(tmp_path, toy.sft(task, optimizer={"lr": 0.1}), resume=True)
    toy.run_stage(tmp_path, toy.sft(task, checkpoint={"every": 2}), resume=True)
    assert toy.metrics(tmp_path)[-1]["step"] == 3


def test_a_fresh_run_does_not_take_up_what_lies_there(task: Path, tmp_path: Path) -> None:
    interrupted(tmp_path, toy.sft(task))
    with pytest.raises(CheckpointError, match="holds one of stage 'sft'"):
        toy.run_stage(tmp_path, toy.sft(task))


def test_the_second_stage_counts_on_and_keeps_the_first_ones_lines(task: Path, tmp_path: Path) -> None:
    first, second = toy.sft(task), toy.rl(task, checkpoint={"every": 1, "keep_last": 2})
    toy.run_stage(tmp_path, first)
    flag = InterruptFlag()
    flag.set()
    with pytest.raises(Interrupted):
        toy.run_stage(tmp_path, second, interrupt=flag)
    toy.run_stage(tmp_path, second, resume=True)
    found = [(line["stage"], line["step"], line["global_step"]) for line in toy.metrics(tmp_path)]
    assert found == [("sft", 1, 1), ("sft", 2, 2), ("sft", 3, 3), ("rl", 1, 4), ("rl", 2, 5), ("rl", 3, 6)]
    assert list(toy.rollouts(tmp_path)) == [f"step_{step:06d}.parquet" for step in (4, 5, 6)]
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["global_step_5", "global_step_6"]
