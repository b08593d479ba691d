"""Worker processes: killed and replaced, gone with their parent, and blind to the user's ``__main__``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from posttune.config.base import RewardRef
from posttune.errors import PluginCallError, UserError
from posttune.facade import build_rewards
from posttune.types import Sample
from rewards_for_tests import made, samples, write

pytestmark = pytest.mark.slow

SEEDS = Path(__file__).parents[3] / "tests/data/seeds"


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends while it is read
        return False
    return state != "Z"


def gone(pids: list[int], seconds: float = 30.0) -> bool:
    """Whether the processes end in time."""
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_after_hung_samples_the_next_is_right_and_the_hung_are_gone(tmp_path: Path) -> None:
    rewards = made(tmp_path, executor="process", workers=4, timeout=3.0)
    before = [int(pid) for pid in rewards.score(samples(*["pid"] * 40))["odd"] if pid]
    assert set(rewards.pids["odd"]) >= set(before)
    workers = list(rewards.pids["odd"])
    began = time.monotonic()
    assert rewards.score(samples("hang", "hang", "hang", "hang", "right")) == {"odd": [None] * 4 + [1.0]}
    assert time.monotonic() - began < 60
    assert gone(workers)
    assert not set(workers) & set(rewards.pids["odd"])
    assert rewards.stats["odd"].timeouts == 4
    left = list(rewards.pids["odd"])
    rewards.close()
    assert gone(left)


def test_what_a_reward_started_is_killed_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    rewards = made(tmp_path, executor="process", workers=1, timeout=1.0)
    assert rewards.score(samples(f"child:{note}")) == {"odd": [None]}
    assert gone([int(note.read_text())])


def test_a_worker_that_dies_is_an_error_of_its_sample_alone(tmp_path: Path) -> None:
    rewards = made(tmp_path, executor="process", workers=2, on_error="mask")
    assert rewards.score(samples("die", "one", "die", "two")) == {"odd": [None, 1.0, None, 1.0]}
    assert rewards.stats["odd"].errors == 2
    raising = made(tmp_path, executor="process", workers=1)
    with pytest.raises(PluginCallError, match="worker process died while scoring sample s0"):
        raising.score(samples("die"))
    assert raising.score(samples("one")) == {"odd": [1.0]}


@pytest.mark.parametrize(("bad", "counted"), [("hang", "timeouts"), ("die", "errors")])
def test_calls_sent_ahead_of_a_bad_one_are_made_by_others(tmp_path: Path, bad: str, counted: str) -> None:
    rewards = made(tmp_path, executor="process", workers=2, timeout=2.0, on_error="mask")
    texts = [bad if i in (50, 51, 120) else "one" for i in range(200)]
    expected = [None if text == bad else 1.0 for text in texts]
    assert rewards.score(samples(*texts)) == {"odd": expected}
    assert getattr(rewards.stats["odd"], counted) == 3
    large = ["x" * 100_000 if i % 3 == 0 else "one" for i in range(60)]
    assert rewards.score(samples(*large, "hang", *large)) == {"odd": [1.0] * 60 + [None] + [1.0] * 60}


def test_memory_is_limited(tmp_path: Path) -> None:
    rewards = made(tmp_path, executor="process", workers=1, memory_mb=1500, on_error="mask")
    assert rewards.score(samples("memory", "one")) == {"odd": [None, 1.0]}
    assert rewards.stats["odd"].errors == 1
    with pytest.raises(PluginCallError, match="MemoryError"):
        made(tmp_path, executor="process", workers=1, memory_mb=1500).score(samples("memory"))


def test_what_rewards_print_stays_off_the_pipe_and_off_stdout(tmp_path: Path, capfd) -> None:
    rewards = made(tmp_path, executor="process", workers=2)
    assert rewards.score(samples(*["print"] * 20)) == {"odd": [1.0] * 20}
    out, err = capfd.readouterr()
    assert out == ""
    assert "noise" in err


def test_texts_of_every_kind_arrive_whole(tmp_path: Path) -> None:
    path = tmp_path / "f.py"
    path.write_text("def f(response, when): return {'length': len(response), 'year': when.year}")
    from datetime import UTC, datetime

    ref = RewardRef(name="function", options={"path": f"{path}:f"}, executor="process", workers=2)
    texts = ["", "\0", "\ud800", "x" * 3_000_000, "مرحبا", "\u202e"]
    found = build_rewards([ref]).score(samples(*texts, when=datetime(2026, 1, 1, tzinfo=UTC)))["function"]
    assert [score["length"] for score in found] == list(map(len, texts))
    assert found[0]["year"] == 2026


def test_a_column_that_no_process_can_take_is_named(tmp_path: Path) -> None:
    path = tmp_path / "f.py"
    path.write_text("def f(response, odd=None): return 1")
    ref = RewardRef(name="function", options={"path": f"{path}:f"}, executor="process", on_error="mask")
    rewards = build_rewards([ref])
    assert rewards.score(samples("a", odd=lambda: 1)) == {"function": [None]}
    assert rewards.score(samples("a", unread=lambda: 1)) == {"function": [1.0]}


def test_a_reward_that_cannot_be_loaded_there_says_why(tmp_path: Path) -> None:
    path = tmp_path / "f.py"
    path.write_text(
        "import os\nif 'POSTTUNE_WORKER' in os.environ: raise OSError('no model')\ndef f(response): 1"
    )
    ref = RewardRef(name="function", options={"path": f"{path}:f"}, executor="process", on_error="mask")
    with pytest.raises(UserError, match="importing it failed at line 2: OSError: no model"):
        build_rewards([ref]).score(samples("a"))


def test_the_workers_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    script = f"""
    import sys
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from pathlib import Path
    from rewards_for_tests import made, samples
    rewards = made(Path({str(tmp_path)!r}), executor="process", workers=2, timeout=1000.0)
    rewards.score(samples("a", "b"))
    print(*rewards.pids["odd"], flush=True)
    rewards.score(samples("hang", "hang"))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert pids
        time.sleep(0.3)
        parent.send_signal(signal.SIGKILL)
    assert gone(pids)


MAIN = """
ORIGINAL_MAIN = True
print("main runs")
from posttune.config.base import RewardRef
from posttune.facade import build_rewards
from posttune.types import Sample
ref = RewardRef(name="function", label="odd", options={"path": "PATH:NAME"}, executor="process", workers=2)
print(build_rewards([ref]).score([Sample("a", 0, "p", "RESPONSE"), Sample("b", 0, "p", "x")])["odd"])
"""


@pytest.mark.parametrize("how", ["script", "stdin", "command"])
def test_a_script_without_a_main_guard_works(tmp_path: Path, how: str) -> None:
    code = MAIN.replace("PATH", str(write(tmp_path))).replace("NAME", "sync").replace("RESPONSE", "main")
    assert run(tmp_path, code, how) == ["main runs", "[0.0, 1.0]"]


def test_the_reward_of_the_seeds_runs_in_every_executor(tmp_path: Path) -> None:
    if not SEEDS.is_dir():
        pytest.skip("the seeds are not here")
    text = "Step by step: the answer is 4"
    for executor in ("inline", "thread", "process"):
        path = f"{SEEDS}/reward_func.py:reward_func"
        ref = RewardRef(name="function", label="f", options={"path": path}, executor=executor)
        found = build_rewards([ref]).score([Sample("a", 0, "p", text), Sample("b", 0, "p", "4")])
        assert found == {"f": [1.0, 0.0]}


def test_a_function_of_the_running_script_is_refused(tmp_path: Path) -> None:
    code = "def score(response): return 1\n" + MAIN.replace("NAME", "score")
    for how, path in (("script", "script.py"), ("stdin", "__main__")):
        with pytest.raises(AssertionError, match="is defined in the script that is running"):
            run(tmp_path, code.replace("PATH", path), how)
    ref = RewardRef(name="function", options={"path": "tests.x:f.<locals>.g"}, executor="process")
    with pytest.raises(UserError):
        build_rewards([ref])


def run(folder: Path, code: str, how: str) -> list[str]:
    """The lines that a script prints."""
    script = folder / "script.py"
    script.write_text(code)
    arguments = {"script": [str(script)], "stdin": ["-"], "command": ["-c", code]}[how]
    done = subprocess.run(
        [sys.executable, *arguments],
        input=code if how == "stdin" else None,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
