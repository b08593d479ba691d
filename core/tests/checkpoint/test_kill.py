"""kill -9 at every point where a save, a removal or an export changes the disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = r"""
import builtins, io, json, os, shutil, signal, sys
from pathlib import Path

import torch

from posttune.checkpoint import store
from posttune.checkpoint._export import export_model
from posttune.checkpoint.saver import Saver
from posttune.checkpoint.sources import open_source
from posttune.checkpoint.writing import begin
from posttune.config.models import LoraConfig, ModelConfig, PluginRef
from posttune.distributed.ranks import Ranks
from posttune.models.load import load_model, new_model
from posttune.models.tokenizer import byte_tokenizer, save_tokenizer

torch.set_num_threads(1)
root, what = Path(sys.argv[1]), sys.argv[2]
tokenizer = byte_tokenizer()
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
model = new_model({"model_type": "llama", **sizes}, tokenizer, seed=0)
optimizer = torch.optim.AdamW(model.parameters())


def save(folder, step):
    data = {"state": {"step": step}, "config": {}}
    begin(folder, step, model=model, optimizer=optimizer, tokenizer=tokenizer, **data).complete()


def save_in_background(folder, step):
    saver = Saver(Ranks(), True)
    data = {"model": model, "optimizer": optimizer, "state": {"step": step}, "config": {}}
    saver.save(lambda ranks: begin(folder, step, copy=True, background=ranks, tokenizer=tokenizer, **data))
    saver.wait()


def kill_at(count):
    # From now on the count-th change of the disk is the last thing this process does.
    left = [count]

    def watched(function, counts=lambda *a, **k: True):
        def call(*args, **kwargs):
            if counts(*args, **kwargs):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call

    def writes(file, mode="r", *args, **kwargs):
        return any(letter in mode for letter in "wax+")

    for name in ("fsync", "replace", "rename", "mkdir", "rmdir", "unlink", "write"):
        setattr(os, name, watched(getattr(os, name)))
    builtins.open = io.open = watched(io.open, writes)


def attempt(point, work):
    # Whether ``work`` in another process lived through the fault at ``point``.
    child = os.fork()
    if child == 0:
        code = 1
        try:
            kill_at(point)
            work()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert status == 0 or os.WIFSIGNALED(status), status
    return status == 0


def sweep(second, write=save):
    # Kill a save of step ``second`` at each point in turn, after a whole one of step 1.
    found = []
    for point in range(1, 1000):
        folder = root / f"run-{point}"
        shutil.copytree(root / "template", folder)
        finished = attempt(point, lambda: write(folder, second))
        last = store.latest(folder)
        whole = [path.name for path in folder.glob("global_step_*")]
        assert all(store.what_is_missing(folder / path) is None for path in whole), (point, whole)
        found.append(store.read_state(last)["step"] if last else None)
        if finished:
            return found
        save(folder, second)  # it clears what the killed one left
        assert not list(folder.glob(".global_step_*")), point
        assert store.read_state(store.latest(folder))["step"] == second
    raise AssertionError("no end")


def sweep_prune():
    # Kill the removal of the older of three checkpoints, of which the first is the best one.
    found = []
    for step in (2, 3):
        save(root / "template", step)
    for point in range(1, 1000):
        folder = root / f"run-{point}"
        shutil.copytree(root / "template", folder)
        finished = attempt(point, lambda: store.prune(folder, 1, {1}))
        assert store.latest(folder).name == "global_step_3"
        assert store.what_is_missing(folder / "global_step_1") is None
        found.append(3)
        store.prune(folder, 1, {1})
        assert sorted(path.name for path in folder.iterdir()) == ["global_step_1", "global_step_3"], point
        if finished:
            return found
    raise AssertionError("no end")


def sweep_export(source, exporter, marker, step):
    # Kill an export at every ``step``-th point: there is no folder, or a whole one.
    found = []
    write = lambda to: export_model(source, to, exporter=PluginRef(name=exporter))
    for point in range(1, 1000, step):
        to = root / f"out-{point}" / "model"
        finished = attempt(point, lambda: write(to))
        found.append((to / marker).is_file())
        assert found[-1] == to.exists(), point
        if found[-1]:
            open_source(to).load_model()
        if finished:
            return found
        if not found[-1]:
            write(to)
            assert [path.name for path in to.parent.iterdir()] == ["model"], point
    raise AssertionError("no end")


def adapters():
    model.save_pretrained(root / "base")
    save_tokenizer(tokenizer, root / "base")
    config = ModelConfig(path=str(root / "base"), lora=LoraConfig(rank=2))
    loaded = load_model(config, root / "base", seed=0)
    data = {"optimizer": None, "state": {}, "config": {}, "tokenizer": tokenizer, "base": loaded.base}
    return begin(root / "adapters", 1, model=loaded.model, **data).complete()


save(root / "template", 1)
found = {
    "new": lambda: sweep(2),
    "again": lambda: sweep(1),
    "background": lambda: sweep(2, save_in_background),
    "prune": sweep_prune,
    "hf": lambda: sweep_export(open_source(root / "template"), "hf", "model.safetensors", 3),
    "lora_adapter": lambda: sweep_export(
        open_source(adapters()), "lora_adapter", "adapter_model.safetensors", 3
    ),
}[what]()
print(json.dumps(found))
"""


def swept(folder: Path, what: str) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), what],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("what", ["new", "background"])
def test_every_point_leaves_a_whole_checkpoint(tmp_path: Path, what: str) -> None:
    new = swept(tmp_path, what)
    assert len(new) > 20  # points
    assert set(new) == {1, 2}  # step 1 until the rename, step 2 from then on
    assert new == sorted(new)
    assert new.count(2) >= 1


@pytest.mark.slow
def test_a_step_that_is_written_again(tmp_path: Path) -> None:
    again = swept(tmp_path, "again")  # two renames; between them the old one is put back
    assert len(again) > 20
    assert set(again) == {1}


@pytest.mark.slow
def test_a_removal_leaves_the_newest_and_the_best(tmp_path: Path) -> None:
    assert len(swept(tmp_path, "prune")) > 10


@pytest.mark.slow
@pytest.mark.parametrize("exporter", ["hf", "lora_adapter"])
def test_an_export_is_whole_or_not_there(tmp_path: Path, exporter: str) -> None:
    found = swept(tmp_path, exporter)
    assert len(found) >= 5
    assert not found[0]
    assert found[-1]
    assert found == sorted(found)
