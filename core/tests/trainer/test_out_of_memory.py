"""Out of memory: the ledger and three changes, whichever allocator failed and wherever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_toy as toy
from posttune.config.load import dump_yaml, load_config
from posttune.config.models import RlStage
from posttune.errors import PluginCallError, PluginId, RunError
from posttune.memory.ledger import Ledger
from posttune.memory.oom import cause, changes, explained
from posttune.trainer import _update
from posttune.trainer.metrics import Meter

pytestmark = pytest.mark.slow

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.95 GiB."
CPU_DEVICE = torch.device("cpu")
CPU = "[enforce fail at alloc_cpu.cpp:126] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"


def failing(error: BaseException) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(CUDA), RuntimeError(CPU), MemoryError()])
def test_the_phase_the_ledger_and_three_changes(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(_update, "response_logprobs", failing(error))
    stage = toy.rl(task, packing={"micro_batch_tokens": 512})
    made = toy.context(tmp_path, {"rl": stage}, "rl")
    with pytest.raises(RunError) as caught, explained("rl", made.run.stages["rl"], CPU_DEVICE):
        toy.run_stage(tmp_path, stage)
    text = str(caught.value)
    assert caught.value.exit_code == 1
    assert "out of memory in 'update'" in text
    assert "rollout" in text  # the ledger has the phases before it
    assert "<- here" in text
    assert "weights" in text
    _, advice = text.split("next:")
    overrides = [line.split()[0] for line in advice.splitlines()[1:]]
    assert len(overrides) == 3
    assert overrides[0] == "rl.packing.micro_batch_tokens=256"


def test_every_change_is_an_override_that_the_configuration_takes(task: Path, tmp_path: Path) -> None:
    stage = toy.rl(
        task,
        advantage={"name": "gae"},
        critic={},
        kl={"where": "reward", "estimator": "k1"},
        rollout={"resources": {"memory_share": 0.4}},
    ) | {"model": {"path": str(task / "model")}}
    path = tmp_path / "run.yaml"
    path.write_text(dump_yaml({"output": str(tmp_path / "run"), "stages": {"rl": stage}}))
    seen: list[str] = []
    for phase in ("rollout", "update"):
        for _ in range(4):  # each time the three are taken, and others come
            loaded = load_config(path, seen)
            found = loaded.config.stages["rl"]
            assert isinstance(found, RlStage)
            advice = changes("rl", found, phase)
            assert len(advice) == 3
            seen += [line.split("   (")[0].strip("'") for line in advice]
    assert any("memory_share" in each for each in seen)
    assert any("offload" in each for each in seen)


def test_an_engines_error_is_seen_through() -> None:
    outer = PluginCallError("failed", plugin=PluginId("rollout_backend", "vllm"))
    outer.__cause__ = torch.OutOfMemoryError(CUDA)
    assert cause(outer) is outer.__cause__


def test_another_error_stays_what_it_is(task: Path, tmp_path: Path) -> None:
    stage = toy.context(tmp_path, {"sft": toy.sft(task)}, "sft").run.stages["sft"]
    with pytest.raises(RuntimeError, match="shapes"), explained("sft", stage, CPU_DEVICE):
        raise RuntimeError("shapes cannot be multiplied")
    assert cause(ValueError("out of memory")) is None


def test_a_run_ends_with_exit_code_1(task: Path, tmp_path: Path) -> None:
    """From the command line, with the error planted where the loss is computed."""
    path = tmp_path / "run.yaml"
    path.write_text(dump_yaml({"output": str(tmp_path / "run"), "stages": {"sft": toy.sft(task)}}))
    plant = (
        "import sys, torch\n"
        "from posttune.trainer import sft\n"
        "def fail(*_, **__):\n"
        f"    raise torch.OutOfMemoryError({CUDA!r})\n"
        "sft.response_logprobs = fail\n"
        "from posttune.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", plant, "run", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "stage 'sft': out of memory in 'update': CUDA out of memory" in done.stderr
    assert done.stderr.count("   (") == 3


def test_phases_within_phases_are_measured_apart() -> None:
    ledger = Ledger()
    ledger.restart(torch.device("cpu"))
    kept = []
    with ledger.phase("outer"):
        with ledger.phase("inner"):
            kept.append(torch.ones(1 << 24))
        with ledger.phase("inner"):
            pass
    assert set(ledger.phases) == {"outer", "inner"}
    found = ledger.metrics()
    assert found["memory/inner/rss_mb"] >= 64
    assert "outer" in ledger.table()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_the_allocators_own_error_is_explained(task: Path, tmp_path: Path) -> None:
    device = torch.device("cuda")
    torch.cuda.set_per_process_memory_fraction(0.01)
    try:
        stage = toy.context(tmp_path, {"sft": toy.sft(task)}, "sft").run.stages["sft"]
        with (
            pytest.raises(RunError, match="out of memory"),
            explained("sft", stage, device),
            Meter().timed("update"),
        ):
            torch.empty(1 << 34, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
