"""Workers: killed when they overrun, replaced at once, gone with their owner; from threads and any script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from posttune_sympy import MathRewardFunction, workers

pytestmark = pytest.mark.slow

# SymPy works on each of these for ever.
HANGS = [rf"\boxed{{\prod_{{k=1}}^{{10000000{last}}} k}}" for last in range(8)]
SLACK = 30.0  # seconds beyond a limit: the answers would hang for ever, so that this tells no speed
# Right, and only SymPy can tell.
RIGHT = r"\boxed{\cos\frac{\pi}{7}\cos\frac{2\pi}{7}\cos\frac{3\pi}{7}}"


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    """SymPy's import is not part of any limit."""
    assert score(r"\boxed{\sin\frac{\pi}{5}}", r"\cos\frac{3\pi}{10}") == 1.0
    yield
    workers.pool().close()


def score(response: str, reference: str, reward: MathRewardFunction | None = None) -> float:
    return (reward or MathRewardFunction()).compute_reward(prompt="", response=response, reference=reference)


def nursery() -> psutil.Process:
    """The process that the workers are forked from; this one may have other children."""
    children = psutil.Process().children()
    (found,) = [child for child in children if "posttune.workers:serve" in " ".join(child.cmdline())]
    return found


def gone(pids: set[int], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def busy() -> set[int]:
    """Workers that compute now."""
    before = {p.pid: sum(p.cpu_times()[:2]) for p in nursery().children(recursive=True)}
    time.sleep(0.3)
    return {
        p.pid
        for p in nursery().children(recursive=True)
        if sum(p.cpu_times()[:2]) > before.get(p.pid, 0) + 0.01
    }


def test_four_hang_then_a_right_answer() -> None:
    reward = MathRewardFunction(time_limit=1.0)
    for response in HANGS[:4]:
        began = time.monotonic()
        assert score(response, "1", reward) == 0.0
        assert time.monotonic() - began < 1.0 + SLACK
    assert reward.counts["timeouts"] == 4
    began = time.monotonic()
    assert score(RIGHT, r"\frac{1}{8}", reward) == 1.0
    assert time.monotonic() - began < 1.0 + SLACK
    assert busy() == set()


@pytest.mark.slow
def test_four_hang_at_once_beside_a_right_answer() -> None:
    reward = MathRewardFunction(time_limit=15.0)
    with ThreadPoolExecutor(5) as threads:
        hung = [threads.submit(score, response, "1", reward) for response in HANGS[4:8]]
        at_work: set[int] = set()
        while len(at_work) < 4 and not any(each.done() for each in hung):
            at_work |= busy()
        right = threads.submit(score, RIGHT, r"\frac{2}{16} + 0", reward)
        assert right.result() == 1.0
        assert not all(each.done() for each in hung)
        assert [each.result() for each in hung] == [0.0] * 4
    assert len(at_work) == 4
    assert gone(at_work)
    assert busy() == set()


def test_from_many_threads() -> None:
    pairs = [
        (rf"\boxed{{\sin\frac{{\pi}}{{{n}}}}}", rf"\cos\frac{{{n - 2}\pi}}{{{2 * n}}}") for n in range(7, 23)
    ]
    reward = MathRewardFunction(time_limit=60.0)
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda pair: score(*pair, reward), pairs)) == {1.0}


def test_idle_workers_that_were_killed_are_replaced() -> None:
    for child in nursery().children():
        child.kill()
    assert score(r"\boxed{\sin\frac{\pi}{41}}", r"\cos\frac{39\pi}{82}") == 1.0


def test_a_killed_nursery_is_replaced() -> None:
    mother = nursery()
    children = mother.children()
    mother.kill()
    mother.wait(5)
    for child in children:
        child.kill()
    assert score(r"\boxed{\sin\frac{\pi}{43}}", r"\cos\frac{41\pi}{86}") == 1.0


def test_a_worker_that_fails_dies_alone() -> None:
    with pytest.raises(workers.WorkerDied, match="KeyError"):
        workers.pool().ask({"operation": "equal"}, SLACK)
    one = ["num", {"q": "1"}, 0]
    assert workers.pool().ask({"operation": "equal", "nodes": [one, one]}, SLACK)[0] is True


def test_after_a_fork() -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = int(score(r"\boxed{\sin\frac{\pi}{47}}", r"\cos\frac{45\pi}{94}") != 1.0)
        finally:
            workers.pool().close()
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert score(r"\boxed{\sin\frac{\pi}{53}}", r"\cos\frac{51\pi}{106}") == 1.0


SCRIPT = rf"""
from posttune_sympy import MathRewardFunction
print("once", flush=True)
reward = MathRewardFunction(time_limit=30)
print(reward.compute_reward(prompt="", response=r"{RIGHT}", reference="1/8"))
"""


@pytest.mark.parametrize("way", ["stdin", "file", "-c"])
def test_scripts_without_a_main_guard(way: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # A module of the user's with the name of a standard one harms nobody.
    (tmp_path / "resource.py").write_text("raise RuntimeError('the user\\'s file was imported')")
    command = {"stdin": ["-"], "file": [str(script)], "-c": ["-c", SCRIPT]}[way]
    done = subprocess.run(
        [sys.executable, *command],
        input=SCRIPT if way == "stdin" else None,
        cwd=tmp_path if way != "stdin" else Path.cwd(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["once", "1.0"]
    assert done.stderr == ""


def test_nothing_is_left_of_a_killed_owner() -> None:
    code = f"""
import threading, time
from posttune_sympy import MathRewardFunction
reward = MathRewardFunction(time_limit=300)
def hang():
    reward.compute_reward(prompt="", response=r"{HANGS[0]}", reference="1")
threading.Thread(target=hang, daemon=True).start()
print("started", flush=True)
time.sleep(300)
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        assert owner.stdout.readline() == "started\n"
        deadline = time.monotonic() + 60
        children: set[int] = set()
        while len(children) < 2 and time.monotonic() < deadline:
            children = {process.pid for process in psutil.Process(owner.pid).children(recursive=True)}
            time.sleep(0.05)
        assert len(children) == 2  # the nursery and the worker
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
        assert gone(children)


def test_importing_and_easy_answers_are_light() -> None:
    code = """
import sys
from posttune_sympy import MathRewardFunction
assert MathRewardFunction().compute_reward(prompt="", response=r"\\boxed{\\frac12}", reference="0.5") == 1.0
print(sorted({"sympy", "mpmath", "torch", "transformers"} & sys.modules.keys()))
import psutil
print(psutil.Process().children())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]"]
