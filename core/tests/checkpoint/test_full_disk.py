"""A disk that fills while a checkpoint or an export is written leaves the last whole one.

Once by a fault at each call that changes the disk, in turn, and once by file systems that are too small
by more and more bytes (these need root to be mounted).
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from posttune.checkpoint import _export, store, writing
from posttune.checkpoint._export import export_model
from posttune.checkpoint.saver import Saver
from posttune.checkpoint.sources import ModelSource, open_source
from posttune.config.models import LoraConfig, ModelConfig, PluginRef
from posttune.distributed.ranks import Ranks
from posttune.errors import CheckpointError, ExportError, PosttuneError, UserError
from posttune.models.load import load_model, new_model
from posttune.models.tokenizer import byte_tokenizer, save_tokenizer

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
TOKENIZER = byte_tokenizer()


class Run:
    """A model after one step, and ways to save it."""

    def __init__(self) -> None:
        self.model = new_model({"model_type": "llama", **SIZES}, TOKENIZER, seed=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        ids = torch.arange(8)[None]
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()

    def begin(self, folder: Path, step: int, **more: Any) -> writing.Draft:
        data: dict[str, Any] = {"state": {"step": step}, "config": {}, "tokenizer": TOKENIZER}
        return writing.begin(folder, step, model=self.model, optimizer=self.optimizer, **data, **more)

    def save(self, folder: Path, step: int) -> Path:
        return self.begin(folder, step).complete()

    def save_in_background(self, folder: Path, step: int) -> None:
        saver = Saver(Ranks(), True)
        saver.save(lambda ranks: self.begin(folder, step, copy=True, background=ranks))
        saver.wait()


@pytest.fixture(scope="module")
def run() -> Run:
    return Run()


@pytest.fixture(scope="module")
def sources(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSource]:
    """What each exporter writes."""
    folder = tmp_path_factory.mktemp("sources")
    whole = run.save(folder / "run", 1)
    run.model.save_pretrained(folder / "base")
    save_tokenizer(TOKENIZER, folder / "base")
    loaded = load_model(ModelConfig(lora=LoraConfig(rank=2)), folder / "base", seed=0)
    data: dict[str, Any] = {"state": {}, "config": {}, "tokenizer": TOKENIZER, "optimizer": None}
    adapters = store.begin(folder / "adapters", 1, model=loaded.model, base=loaded.base, **data).complete()
    return {"hf": open_source(whole), "lora_adapter": open_source(adapters)}


@contextmanager
def full_at(count: int) -> Iterator[list[str]]:
    """The ``count``-th change of the disk fails for want of room. Yields what was asked of the disk."""
    asked: list[str] = []

    def failing(name: str, function: Callable[..., Any], counts: Callable[..., bool]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if counts(*args, **kwargs):
                asked.append(name)
                if len(asked) == count:
                    raise FULL
            return function(*args, **kwargs)

        return call

    def always(*_: Any, **__: Any) -> bool:
        return True

    def writes(_: Any, mode: str = "r", *__: Any, **___: Any) -> bool:
        return any(letter in mode for letter in "wax+")

    with pytest.MonkeyPatch.context() as patched:
        for name in ("fsync", "replace", "rename", "mkdir", "write"):
            patched.setattr(os, name, failing(name, getattr(os, name), always))
        opened = failing("open", io.open, writes)
        patched.setattr(io, "open", opened)
        patched.setattr(builtins, "open", opened)
        yield asked


def each_call(attempt: Callable[[], object]) -> Iterator[tuple[str, PosttuneError | None]]:
    """Let each change of the disk fail in turn: what it was, and the error (None: it did not matter)."""
    for count in range(1, 1000):
        failed: PosttuneError | None = None
        with full_at(count) as asked:
            try:
                attempt()
            except PosttuneError as error:
                failed = error
        if len(asked) < count:
            assert failed is None
            return
        yield asked[count - 1], failed


def test_a_copy_that_finds_no_memory_leaves_no_trace(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, plain = run.save(tmp_path, 1), torch.Tensor.to
    asked = []

    def full(tensor: torch.Tensor, *arguments: Any, copy: bool = False, **more: Any) -> Any:
        if copy:
            asked.extend(path.name for path in tmp_path.glob(".*"))
            raise MemoryError
        return plain(tensor, *arguments, **more)

    monkeypatch.setattr(torch.Tensor, "to", full)
    with pytest.raises(MemoryError) as found:
        run.save_in_background(tmp_path, 1)
    assert len(asked) == 1, "by then its folder was there"
    assert [path.name for path in tmp_path.iterdir()] == [whole.name]
    assert store.what_is_missing(whole) is None
    del found  # until here it kept what it passed through alive: nothing was removed by chance


@pytest.mark.parametrize("way", ["save", "save_in_background"])
def test_a_full_disk_at_each_call_of_a_save(run: Run, tmp_path: Path, way: str) -> None:
    run.save(tmp_path, 1)
    seen = []
    for what, failed in each_call(lambda: getattr(run, way)(tmp_path, 2)):
        left = sorted(path.name for path in tmp_path.iterdir())
        assert all(store.what_is_missing(tmp_path / name) is None for name in left)
        if left == ["global_step_1"]:
            seen.append(what)
            assert isinstance(failed, CheckpointError), what
            assert "No space left on device" in str(failed), what
            continue
        assert left == ["global_step_1", "global_step_2"]
        assert what in ("mkdir", "fsync")  # of a folder that is there; of the list that the new one is on
        shutil.rmtree(tmp_path / "global_step_2")
    assert len(seen) > 20
    assert {"open", "mkdir", "fsync", "replace"} <= set(seen)
    run.save(tmp_path, 3)  # there is room again
    assert store.latest(tmp_path) == tmp_path / "global_step_3"


@pytest.mark.parametrize("exporter", ["hf", "lora_adapter"])
def test_a_full_disk_at_each_call_of_an_export(
    sources: dict[str, ModelSource], tmp_path: Path, exporter: str
) -> None:
    to, seen = tmp_path / "model", []
    export = partial(export_model, sources[exporter], to, exporter=PluginRef(name=exporter))
    for what, failed in each_call(export):
        if not to.exists():
            seen.append(what)
            assert isinstance(failed, ExportError | UserError), what
            assert "No space left on device" in str(failed), what
            assert list(tmp_path.iterdir()) == [], what
            continue
        assert what in ("mkdir", "fsync")
        open_source(to).load_model()
        shutil.rmtree(to)
    assert len(seen) > 8
    assert {"open", "mkdir", "fsync", "replace"} <= set(seen)
    assert open_source(to).lora == (exporter == "lora_adapter")


def test_a_tokenizer_that_cannot_be_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    """Its library raises a bare Exception."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            save_tokenizer(TOKENIZER, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG


@contextmanager
def disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of ``size`` bytes."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def used(folder: Path) -> int:
    """Bytes that files and folders take on a disk of pages of 4096."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return sum(-(-size // 4096) * 4096 for size in sizes)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system")
@pytest.mark.parametrize("way", ["save", "save_in_background"])
def test_a_disk_that_is_too_small_for_a_second_checkpoint(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(writing, "shortage", lambda *_: "")  # nobody looks ahead
    one = used(run.save(tmp_path / "measured", 1))
    refused = 0
    for missing in range(4096, one, one // 12):
        with disk(tmp_path / "disk", 2 * one - missing) as folder:
            run.save(folder, 1)
            with pytest.raises(CheckpointError, match=r"could not be written: .*No space left on device"):
                getattr(run, way)(folder, 2)
            refused += 1
            assert [path.name for path in folder.iterdir()] == ["global_step_1"], missing
            assert store.latest(folder) == folder / "global_step_1"
    assert refused >= 8


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system")
@pytest.mark.parametrize("exporter", ["hf", "lora_adapter"])
def test_a_disk_that_is_too_small_for_an_export(
    sources: dict[str, ModelSource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exporter: str
) -> None:
    monkeypatch.setattr(_export, "shortage", lambda *_: "")
    export = partial(export_model, sources[exporter], exporter=PluginRef(name=exporter))
    one = used(export(tmp_path / "measured").path)
    refused = 0
    for missing in range(4096, one - 4096, one // 12):
        with disk(tmp_path / "disk", one - missing) as folder:
            with pytest.raises(ExportError, match=r"could not be written: .*No space left on device"):
                export(folder / "model")
            refused += 1
            assert list(folder.iterdir()) == [], missing
    assert refused >= 8


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system")
def test_too_little_room_is_known_before_anything_is_written(
    run: Run, sources: dict[str, ModelSource], tmp_path: Path
) -> None:
    with disk(tmp_path / "disk", 65536) as folder:
        with pytest.raises(CheckpointError, match=r"bytes are needed, and the disk has [\d,]+ left"):
            run.save(folder, 1)
        assert list(folder.iterdir()) == []
    with disk(tmp_path / "disk", 8192) as folder:
        with pytest.raises(ExportError, match=r"bytes are needed, and the disk has [\d,]+ left"):
            export_model(sources["hf"], folder / "model")
        assert list(folder.iterdir()) == []
