"""kill -9 at every point where a save touches the disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = r'''
import builtins, io, json, os, shutil, signal, sys
from pathlib import Path

import torch

from posttune.checkpoint import store
from posttune.models.load import new_model
from posttune.models.tokenizer import byte_tokenizer

torch.set_num_threads(1)
root = Path(sys.argv[1])
tokenizer = byte_tokenizer()
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
model = new_model({"model_type": "llama", **sizes}, tokenizer, seed=0)
optimizer = torch.optim.AdamW(model.parameters())


def save(folder, step):
    data = {"state": {"step": step}, "config": {}}
    store.save(folder, step, model=model, optimizer=optimizer, tokenizer=tokenizer, **data)


def kill_at(count):
    """From now on the count-th operation on the disk is the last thing this process does."""
    left = [count]

    def watched(function):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call

    for name in ("fsync", "replace", "rename", "mkdir", "rmdir", "unlink", "write"):
        setattr(os, name, watched(getattr(os, name)))
    builtins.open = io.open = watched(io.open)


def attempt(folder, step, point):
    """Whether a save in another process lived through the fault at ``point``."""
    child = os.fork()
    if child == 0:
        kill_at(point)
        save(folder, step)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def sweep(name, second):
    """Kill a save of step ``second`` at each point in turn, after a whole one of step 1."""
    found = []
    for point in range(1, 1000):
        folder = root / f"{name}-{point}"
        shutil.copytree(root / "template", folder)
        finished = attempt(folder, second, point)
        last = store.latest(folder)
        whole = [path.name for path in folder.glob("global_step_*")]
        assert all(store.what_is_missing(folder / path) is None for path in whole), (point, whole)
        found.append(store.read_state(last)["step"] if last else None)
        if finished:
            return found
        save(folder, second)  # it clears what the killed one left
        assert not list(folder.glob(".global_step_*.tmp*")), point
        assert store.read_state(store.latest(folder))["step"] == second
    raise AssertionError("no end")


save(root / "template", 1)
print(json.dumps({"new": sweep("new", 2), "again": sweep("again", 1)}))
'''


@pytest.mark.slow
def test_every_point_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    new = found["new"]
    assert len(new) > 20  # points
    assert set(new) == {1, 2}  # step 1 until the rename, step 2 from then on
    assert new == sorted(new)
    assert new.count(2) >= 1
    again = found["again"]  # the step that is there is written again: two renames, between them none
    assert again.count(None) <= 1
    assert set(again) <= {1, None}
