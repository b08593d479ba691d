"""2N steps equal N, a kill, a resume and N: bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_toy as toy
from posttune.data.conversion import ConvertRequest, convert
from posttune.errors import CheckpointError, Interrupted
from posttune.facade.rollout import RolloutEngine
from posttune.run.stages import InterruptFlag
from posttune.types import Request

pytestmark = pytest.mark.slow

RUN = """
import json, os, signal, sys, torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import trainer_toy as toy
from posttune.distributed.ranks import Ranks
from posttune.facade import Observers
from posttune.run.stages import InterruptFlag
number, place, count = int(sys.argv[4]), sys.argv[5], int(sys.argv[6])
device, resume = torch.device(sys.argv[7]), sys.argv[8:] == ["resume"]
torch.use_deterministic_algorithms(device.type == "cuda", warn_only=True)
owner = Observers if place == "step" else torch.autograd
function, calls = getattr(owner, place), []
def watched(*args, **kwargs):
    result = function(*args, **kwargs)
    calls.append(1)
    if len(calls) == count:
        os.kill(os.getpid(), number)
    return result
setattr(owner, place, watched)
with InterruptFlag().installed() as flag:
    toy.run_stage(
        Path(sys.argv[2]),
        json.loads(sys.argv[3]),
        interrupt=flag,
        observers=toy.EVERYTHING,
        ranks=Ranks(device=device),
        resume=resume,
    )
"""
NEVER = 1 << 30


def struck(
    output: Path,
    stage: dict[str, Any],
    number: signal.Signals,
    place: str,
    count: int,
    *,
    device: str = "cpu",
    resume: bool = False,
) -> int:
    """Run the stage in a process of its own, which gets a signal after the ``count``-th call of ``place``.

    ``place``: "step", when the line of a step is written, or "backward", of one micro-batch.
    Returns the exit status.
    """
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", RUN, here, str(output), json.dumps(stage), str(int(number)), place]
    command += [str(count), device, *(["resume"] if resume else [])]
    # Deterministic sums of cuBLAS, as torch's documents ask for them.
    settings = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return subprocess.run(command, check=False, timeout=500, env=settings).returncode


def stages(task: Path, kind: str) -> dict[str, Any]:
    """8 steps through 24 rows: the resume lies in the second epoch, and in the middle of a schedule."""
    scheduled = {"optimizer": {"lr": 1e-3, "warmup_steps": 6, "schedule": "cosine"}}
    common = {"steps": 8, "checkpoint": {"every": 2}, **scheduled}
    if kind == "sft":
        return toy.sft(task, **common)
    adaptive = {"coef": 0.05, "target": 0.01, "horizon": 500}
    if kind == "grpo":
        return toy.rl(
            task, batch={"prompts": 6, "mini_batches": 2}, kl={"where": "loss", **adaptive}, **common
        )
    return toy.rl(
        task,
        batch={"prompts": 6, "mini_batches": 2, "epochs": 2},
        advantage={"name": "gae"},
        critic={"warmup_steps": 1, "optimizer": {"lr": 1e-2, "warmup_steps": 6}},
        kl={"where": "reward", "estimator": "k1", **adaptive},
        **common,
    )


KINDS = ["sft", "grpo", "ppo"]


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True], ids=["at-once", "background"])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_resumed_equals_never_stopped(
    task: Path, tmp_path: Path, kind: str, background: bool
) -> None:
    stage = toy.merged(stages(task, kind), {"checkpoint": {"async_save": background}})
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    toy.run_stage(whole, stage, observers=toy.EVERYTHING)
    assert struck(parts, stage, signal.SIGKILL, "step", 5) == -signal.SIGKILL
    assert len(toy.metrics(parts)) == 5
    assert {path.name for path in (parts / "checkpoints").glob("global*")} <= {
        "global_step_2",
        "global_step_4",
    }
    toy.run_stage(parts, stage, resume=True, observers=toy.EVERYTHING)
    toy.assert_same_run(whole, parts, 8)
    points = [toy.points(folder) for folder in (whole, parts)]
    assert len(points[0]) > 8 * 3
    assert points[0] == points[1]
    if kind != "sft":
        coefficients = {line["kl_coef"] for line in toy.metrics(whole)}
        assert len(coefficients) > 3  # the controller did move


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_resumed_on_a_gpu_in_bfloat16(task: Path, tmp_path: Path, kind: str) -> None:
    """With torch's deterministic algorithms: without them a GPU's sums differ from run to run."""
    model = {"model": {"path": str(task / "model"), "dtype": "bfloat16"}}
    stage = toy.merged(stages(task, kind), model)
    whole, parts, kill = tmp_path / "whole", tmp_path / "parts", signal.SIGKILL
    assert struck(whole, stage, kill, "step", NEVER, device="cuda") == 0
    assert struck(parts, stage, kill, "step", 5, device="cuda") == -kill
    assert len(toy.metrics(parts)) == 5
    assert struck(parts, stage, kill, "step", NEVER, device="cuda", resume=True) == 0
    toy.assert_same_run(whole, parts, 8)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_between_micro_batches_ends_the_step_and_saves(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    few = {"packing": {"micro_batch_tokens": 24}, "checkpoint": {"every": 0}}
    stage = toy.merged(stages(task, "sft"), few)
    calls: list[int] = []
    backward = torch.autograd.backward

    def counted(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        backward(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch.autograd, "backward", counted)
        toy.run_stage(tmp_path / "whole", stage)
    assert len(calls) >= 2 * 8  # micro-batches of 8 steps
    parts = tmp_path / "parts"
    assert struck(parts, stage, number, "backward", len(calls) // 2 + 1) == 1
    steps = [line["step"] for line in toy.metrics(parts)]
    assert steps == list(range(1, len(steps) + 1))
    assert 2 < len(steps) < 7
    assert [path.name for path in (parts / "checkpoints").iterdir()] == [f"global_step_{len(steps)}"]
    toy.run_stage(parts, stage, resume=True)
    toy.assert_same_run(tmp_path / "whole", parts, 8)


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_a_resume_asks_the_engine_for_what_is_new_alone(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    asked: list[list[tuple[tuple[int, ...], int]]] = []
    generate = RolloutEngine.generate

    def noted(self: RolloutEngine, requests: Sequence[Request], sampling: Any) -> Any:
        asked.append([(tuple(request.prompt_ids), request.seed) for request in requests])
        return generate(self, requests, sampling)

    monkeypatch.setattr(RolloutEngine, "generate", noted)
    stage = toy.merged(stages(task, kind), {"steps": 4, "checkpoint": {"every": 0}})
    toy.run_stage(tmp_path / "whole", stage)
    whole, asked[:] = list(asked), []
    interrupted(tmp_path / "parts", stage)
    assert asked == whole[:1]
    toy.run_stage(tmp_path / "parts", stage, resume=True)
    assert len(whole) == 4
    assert asked == whole


@pytest.mark.parametrize("kind", KINDS)
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
