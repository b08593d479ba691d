"""An engine's process: what it answers, what it says when it fails, and that it ends."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from posttune.engines.answers import Answer
from posttune.engines.frames import Channel
from posttune.engines.link import Plan
from posttune.engines.problems import Explainer, Rule
from posttune.engines.process import Process
from posttune.errors import RunError, UserError
from posttune.types import Request, Sampling

pytestmark = pytest.mark.slow

ENGINE = '''
"""Stands in for an engine."""
import os, signal, sys, time
from posttune.engines.answers import Answer
from posttune.engines.buckets import open_bucket
from posttune.engines.service import main

class Engine:
    hello = {"stand_in": "1.0", "dtype": "float32"}

    def __init__(self, arguments, version):
        print("engine log line", flush=True)
        if arguments.get("fail"):
            raise ValueError(arguments["fail"])
        if arguments.get("die"):
            print("Ignore: Model architectures are not supported", flush=True)
            if arguments.get("told"):
                print("Traceback (most recent call last):\\n  worker: " + arguments["die"], flush=True)
            print("and then more", flush=True)
            os._exit(1)
        if arguments.get("hang"):
            time.sleep(60)

    def generate(self, prompts, seeds, parameters):
        if parameters["max_tokens"] == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        return [Answer(prompt, [0.0] * len(prompt), "s") for prompt in prompts]

    def load_buckets(self, buckets):
        for bucket in buckets:
            for name, tensor in open_bucket(bucket):
                if name == "bad":
                    raise KeyError(name)

    def checksums(self):
        return {}

    def stop(self):
        print("stopped", flush=True)

main(int(sys.argv[1]), Engine)
'''
EXPLAINER = Explainer(
    "engine", [Rule((r"architectures .* not supported",), "it does not know this model", "use hf")], "-v"
)


def tensors() -> list[tuple[str, torch.Tensor]]:
    return [("a.weight", torch.arange(12.0).view(4, 3)), ("b.weight", torch.ones(5, dtype=torch.bfloat16))]


def plan(folder: Path, environment: dict[str, str], timeout: float = 60.0, **arguments: Any) -> Plan:
    return Plan(
        explainer=EXPLAINER,
        arguments=arguments,
        version="any",
        device="cpu",
        bucket=64,
        scratch=folder,
        start_timeout=timeout,
        parameters=lambda sampling, logprobs: {"max_tokens": sampling.max_new_tokens},
        module="stand_in",
        environment=environment,
    )


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Any]:
    """Makes a process whose engine is the stand-in above."""
    (tmp_path / "stand_in.py").write_text(ENGINE, "utf-8")
    made = []

    def make(timeout: float = 60.0, **arguments: Any) -> Process:
        made.append(Process(plan(tmp_path, {"PYTHONPATH": str(tmp_path)}, timeout, **arguments)))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def asked(length: int = 4) -> dict[str, Any]:
    return {
        "requests": [Request("x", (1, 2, 3), 7)],
        "sampling": Sampling(max_new_tokens=length),
        "logprobs": True,
    }


def test_a_process_answers_takes_weights_and_ends(child: Any) -> None:
    link = child()
    assert link.start()["stand_in"] == "1.0"
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


def test_an_answer_that_nobody_waited_for_is_not_taken_for_another(
    child: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = child()
    link.start()

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Channel, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            link.generate(**asked())
    with pytest.raises(RunError, match="has stopped"):
        link.generate(requests=[Request("y", (4, 5), 8)], sampling=Sampling(), logprobs=True)


def test_a_start_that_fails_says_why(child: Any) -> None:
    link = child(fail="Model architectures ['X'] are not supported for now.")
    with pytest.raises(UserError, match="does not know this model"):
        link.start()
    dead = child(die="Model architectures ['X'] are not supported for now.", told=True)
    with pytest.raises(UserError, match=r"does not know this model, at start: worker: Model arch"):
        dead.start()
    silent = child(die="of something else, of which nothing is said")
    with pytest.raises(RunError, match=r"(?s)exited with status 1 during start.*and then more"):
        silent.start()
    late = child(timeout=1.5, hang=True)
    with pytest.raises(RunError, match=r"(?s)did not answer within 2 s at start.*start_timeout_s"):
        late.start()


def test_a_process_ends_with_its_trainer(tmp_path: Path) -> None:
    """Also where the trainer is killed, and cannot stop it; its folder is removed then."""
    (tmp_path / "stand_in.py").write_text(ENGINE, "utf-8")
    script = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_engine_process import Process, plan
folder = Path({str(tmp_path)!r})
(folder / "scratch").mkdir()
link = Process(plan(folder / "scratch", {{"PYTHONPATH": str(folder)}}))
link.start()
print(link._process.pid, flush=True)
sys.stdin.read()
"""
    trainer = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    engine = psutil.Process(int(trainer.stdout.readline()))
    assert (tmp_path / "scratch" / "engine.log").is_file()
    trainer.kill()
    trainer.communicate()
    engine.wait(15)
    assert not (tmp_path / "scratch").exists()
