"""Weights and answers on their way, and the process at the other end; without an engine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from posttune.errors import RunError, UserError
from posttune.types import Request
from posttune_vllm import VllmBackend, VllmOptions
from posttune_vllm._handover import buckets, folder_tensors, open_bucket
from posttune_vllm._tensors import digest
from posttune_vllm.answers import (
    Answer,
    completions,
    pack_answers,
    pack_prompts,
    unpack_answers,
    unpack_prompts,
)
from posttune_vllm.child import Child
from posttune_vllm.facts import Facts
from posttune_vllm.frames import Channel, Closed
from posttune_vllm.link import Plan
from posttune_vllm.weights import Checked, Remembered, needed

SHAPES = {"a.weight": (4, 3), "b.weight": (5,), "lm_head.weight": (4, 3), "rotary.inv_freq": (2,)}


def tensors() -> list[tuple[str, torch.Tensor]]:
    return [("a.weight", torch.arange(12.0).view(4, 3)), ("b.weight", torch.ones(5, dtype=torch.bfloat16))]


def facts(**fields: Any) -> Facts:
    return Facts((), 1, 1, 1, 32, None, fields.pop("tied", True), SHAPES)


def test_prompts_and_answers_survive_the_way() -> None:
    prompts = [[1, 2, 3], [7], [2**31 - 1]]
    assert unpack_prompts(*pack_prompts(prompts)) == prompts
    answers = [Answer([5, 6], [-0.5, -1.25], "s"), Answer([], [], "l"), Answer([9], [-3.0], "a")]
    assert unpack_answers(*pack_answers(answers)) == answers
    silent = [Answer([5], None, "l")]
    assert unpack_answers(*pack_answers(silent)) == silent
    found = completions([Request("x", (1,), 0)], 3, answers, 4)
    assert [(each.index, each.finish_reason, each.weight_version) for each in found] == [
        (0, "stop", 4),
        (1, "length", 4),
        (2, "abort", 4),
    ]
    with pytest.raises(RuntimeError, match="3 answers for 2 requests x 2"):
        completions([Request("x", (1,), 0)] * 2, 2, answers, 4)


def test_buckets_keep_to_their_limit_and_their_files_go(tmp_path: Path) -> None:
    named = [(f"t{i}", torch.full((256,), float(i))) for i in range(5)] + [("large", torch.zeros(4096))]
    seen, sizes = {}, []
    for bucket in buckets(named, 2048, tmp_path):
        sizes.append(bucket.size)
        assert len(list(tmp_path.iterdir())) == 1, "one at a time"
        seen |= dict(open_bucket(bucket.describe()))
        bucket.free()
        bucket.free()
    assert sizes == [2048, 2048, 1024, 16384]
    assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(seen[name], tensor) for name, tensor in named)


def test_a_folder_that_is_not_shared_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="shared"):
        list(folder_tensors(tmp_path))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([("a.weigth", torch.ones(4, 3))], "did you mean 'a.weight'"),
        ([("a.weight", torch.ones(3, 4))], r"shape \[3, 4\], the model wants \[4, 3\]"),
        ([*tensors(), ("b.weight", torch.ones(5))], "given twice"),
        (tensors()[:1], r"1 of 2 tensors are missing \(b.weight\)"),
    ],
)
def test_weights_of_another_model_are_refused(given: list[tuple[str, torch.Tensor]], said: str) -> None:
    with pytest.raises(RunError, match=said):
        list(Checked(given, facts(), needed(facts(), None)))


def test_a_tied_head_may_come_or_not() -> None:
    head = ("lm_head.weight", torch.ones(4, 3))
    for given in (tensors(), [*tensors(), head]):
        passed = [name for name, _ in Checked(given, facts(), needed(facts(), None))]
        assert passed == ["a.weight", "b.weight"]
    untied = facts(tied=False)
    assert len(list(Checked([*tensors(), head], untied, needed(untied, None)))) == 3


def test_what_arrived_is_compared_in_the_engines_type() -> None:
    remembered = Remembered(tensors(), "bfloat16")
    assert [name for name, _ in remembered] == ["a.weight", "b.weight"]
    found = {name: digest(tensor.to(torch.bfloat16)) for name, tensor in tensors()}
    assert remembered.compare(found) == 2
    assert remembered.compare({}) == 0
    with pytest.raises(RunError, match=r"1 of 2 tensors are not in the engine .*\(b.weight\)"):
        remembered.compare(found | {"b.weight": "0"})


def test_frames_carry_json_and_bytes() -> None:
    ours, theirs = (Channel(end) for end in socket.socketpair())
    block = os.urandom(3 << 20)
    sender = threading.Thread(target=ours.send, args=({"x": [1, "é"]}, block))
    sender.start()
    assert theirs.receive() == ({"x": [1, "é"]}, block)
    sender.join()
    with pytest.raises(TimeoutError):
        theirs.receive(0.05)
    ours.close()
    ours.close()
    for call in (theirs.receive, lambda: [theirs.send({}, block) for _ in range(2)]):
        with pytest.raises(Closed):
            call()


ENGINE = '''
"""Stands in for vLLM's side of the process."""
import os, signal, sys, time

class Engine:
    hello = {"vllm": "0.32.0", "dtype": "float32"}

    def __init__(self, arguments, version):
        print("engine log line", flush=True)
        if arguments.get("fail"):
            raise ValueError(arguments["fail"])
        if arguments.get("hang"):
            time.sleep(60)

    def generate(self, prompts, seeds, parameters):
        from posttune_vllm.answers import Answer
        if parameters["max_tokens"] == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        return [Answer(prompt, [0.0] * len(prompt), "s") for prompt in prompts]

    def load_buckets(self, buckets):
        from posttune_vllm._handover import open_bucket
        for bucket in buckets:
            for name, tensor in open_bucket(bucket):
                if name == "bad":
                    raise KeyError(name)

    def checksums(self):
        return {}
'''


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a process whose vLLM is the stand-in above."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\n"
        "module = types.ModuleType('posttune_vllm._engine')\n"
        f"exec(compile({ENGINE!r}, 'engine', 'exec'), module.__dict__)\n"
        "sys.modules['posttune_vllm._engine'] = module\n",
        "utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = []

    def make(timeout: float = 60.0, **arguments: Any) -> Child:
        plan = Plan(
            arguments={"enforce_eager": True, "tensor_parallel_size": 1, **arguments},
            version="v0_32",
            device="cpu",
            bucket=64,
            scratch=tmp_path,
            start_timeout=timeout,
        )
        made.append(Child(plan))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def asked(length: int = 4) -> dict[str, Any]:
    from posttune.types import Sampling

    return {
        "requests": [Request("x", (1, 2, 3), 7)],
        "sampling": Sampling(max_new_tokens=length),
        "logprobs": True,
    }


def test_a_process_answers_takes_weights_and_ends(child: Any) -> None:
    link = child()
    assert link.start()["vllm"] == "0.32.0"
    assert link.generate(**asked()) == [Answer([1, 2, 3], [0.0] * 3, "s")]
    link.load(iter(tensors()))
    with pytest.raises(RunError, match="KeyError"):
        link.load(iter([*tensors(), ("bad", torch.ones(1))]))
    with pytest.raises(ZeroDivisionError):
        link.load((name, tensor / (1 // (name == "a.weight"))) for name, tensor in tensors())
    assert link.checksums() == {}, "it goes on after either"
    link.stop()
    link.stop()
    with pytest.raises(RunError, match="has stopped"):
        link.generate(**asked())


def test_a_process_that_dies_is_told_with_its_last_words(child: Any) -> None:
    link = child()
    link.start()
    began = time.monotonic()
    with pytest.raises(RunError, match=r"(?s)killed by SIGKILL during generation.*engine log line"):
        link.generate(**asked(13))
    assert time.monotonic() - began < 20


def test_a_start_that_fails_says_why(child: Any) -> None:
    link = child(fail="Model architectures ['X'] are not supported for now.")
    with pytest.raises(UserError, match="does not know this model"):
        link.start()
    late = child(timeout=1.5, hang=True)
    with pytest.raises(RunError, match=r"(?s)did not answer within 2 s at start.*start_timeout_s"):
        late.start()


def test_a_process_ends_with_its_trainer(child: Any, tmp_path: Path) -> None:
    """Also where the trainer is killed, and cannot stop it."""
    script = f"""
import sys
from pathlib import Path
from posttune_vllm.child import Child
from posttune_vllm.link import Plan
arguments = {{"enforce_eager": True, "tensor_parallel_size": 1}}
plan = Plan(arguments, "v0_32", "cpu", 64, Path({str(tmp_path)!r}), 60.0)
link = Child(plan)
link.start()
print(link._process.pid, flush=True)
sys.stdin.read()
"""
    trainer = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    engine = psutil.Process(int(trainer.stdout.readline()))
    trainer.kill()
    trainer.communicate()
    engine.wait(15)


def test_a_backend_that_was_not_started() -> None:
    backend = VllmBackend(VllmOptions())
    assert backend.rollout_backend_stop()
    with pytest.raises(UserError, match="not running"):
        backend.rollout_backend_checksums()


def test_nothing_heavy_is_imported_to_list_or_configure() -> None:
    code = (
        "import sys; from posttune.pipeline import options_model; from posttune.describe import describe;"
        "options_model('rollout_backend', 'vllm'); describe('rollout_backend', 'vllm');"
        "print([m for m in ('vllm', 'torch', 'transformers', 'httpx2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
