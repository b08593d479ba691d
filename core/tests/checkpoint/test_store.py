"""Checkpoints: what is saved comes back bit for bit, and what does not fit is refused by name."""

from __future__ import annotations

import json
import random
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from posttune.checkpoint import dcp, store
from posttune.config.models import LoraConfig, ModelConfig
from posttune.errors import CheckpointError
from posttune.models.load import LoadedModel, load_model
from posttune.testing.tiny import tiny_model

Optimizer = torch.optim.Optimizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "base", layers=1)


def begin(folder: Path, lora: LoraConfig | None = None) -> tuple[LoadedModel, Optimizer]:
    loaded = load_model(ModelConfig(path=str(folder), lora=lora), folder, seed=5)
    loaded.model.train()
    trained = [parameter for parameter in loaded.model.parameters() if parameter.requires_grad]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
    return loaded, torch.optim.AdamW([g for g in groups if g["params"]], lr=3e-3)


def train(loaded: LoadedModel, optimizer: Optimizer, steps: int) -> list[float]:
    """Steps whose batches come from all three random generators."""
    losses = []
    for _ in range(steps):
        high = 100 + random.randrange(100) + int(np.random.randint(50))
        ids = torch.randint(3, high, (2, 12))
        loss = loaded.model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save(folder: Path, step: int, loaded: LoadedModel, optimizer: Optimizer | None, **more: Any) -> Path:
    return store.begin(
        folder,
        step,
        model=loaded.model,
        optimizer=optimizer,
        state=more.get("state", {"position": step}),
        tokenizer=loaded.tokenizer,
        config={"seed": 5},
        base=loaded.base,
    ).complete()


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, dropout=0.3)], ids=["full", "lora"])
def test_resumed_training_is_bit_equal(folder: Path, tmp_path: Path, lora: LoraConfig | None) -> None:
    seed_all(1)
    random.gauss(0, 1)  # leaves a second number behind, in the state
    loaded, optimizer = begin(folder, lora)
    train(loaded, optimizer, 3)
    path = save(tmp_path, 3, loaded, optimizer, state={"kl": 0.1 + 0.2, "x": float("inf")})
    losses = train(loaded, optimizer, 3)
    draws = (random.gauss(0, 1), np.random.standard_normal(), torch.rand(2))

    seed_all(99)
    again, second = begin(folder, lora)
    state = store.load(path, model=again.model, optimizer=second)
    assert state == {"kl": 0.1 + 0.2, "x": float("inf")}
    assert train(again, second, 3) == losses
    assert (random.gauss(0, 1), np.random.standard_normal()) == draws[:2]
    assert torch.equal(torch.rand(2), draws[2])
    for (name, one), (_, two) in zip(
        loaded.model.named_parameters(), again.model.named_parameters(), strict=True
    ):
        assert torch.equal(one, two), name
    one_state, two_state = optimizer.state_dict()["state"], second.state_dict()["state"]
    assert one_state.keys() == two_state.keys()
    for key, entries in one_state.items():
        assert all(torch.equal(value, two_state[key][quantity]) for quantity, value in entries.items())


def test_settings_of_the_optimiser_come_back(folder: Path, tmp_path: Path) -> None:
    loaded, optimizer = begin(folder)
    train(loaded, optimizer, 1)
    optimizer.param_groups[0]["lr"] = 7e-4
    path = save(tmp_path, 1, loaded, optimizer)
    again, second = begin(folder)
    store.load(path, model=again.model, optimizer=second)
    assert second.param_groups[0]["lr"] == 7e-4
    assert second.param_groups[1]["lr"] == 3e-3
    assert second.param_groups[0]["betas"] == (0.9, 0.999)


@pytest.mark.parametrize("fused", [False, True])
def test_how_it_computes_is_the_machines(folder: Path, tmp_path: Path, fused: bool) -> None:
    loaded, _ = begin(folder)
    optimizer = torch.optim.AdamW(loaded.model.parameters(), fused=fused)
    train(loaded, optimizer, 1)
    path = save(tmp_path, 1, loaded, optimizer)
    again, _ = begin(folder)
    second = torch.optim.AdamW(again.model.parameters(), fused=not fused)
    store.load(path, model=again.model, optimizer=second)
    assert second.param_groups[0]["fused"] is not fused
    train(again, second, 1)


def test_adapters_alone_are_kept_beside_a_base(folder: Path, tmp_path: Path) -> None:
    loaded, optimizer = begin(folder, LoraConfig(rank=2))
    path = save(tmp_path, 1, loaded, optimizer)
    names = dcp.shapes(path / store.TENSORS)
    assert all(".lora_" in name for name in names if name.startswith("model/"))
    meta = store.read_meta(path)
    assert meta.base is not None
    assert meta.base["path"] == str(folder.resolve())
    assert meta.lora is not None
    assert meta.lora["alpha"] == 32.0


def test_a_base_that_is_gone_or_changed_is_refused(folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(folder, base)
    loaded, optimizer = begin(base, LoraConfig(rank=2))
    path = save(tmp_path / "run", 1, loaded, optimizer)
    shutil.rmtree(base)
    with pytest.raises(CheckpointError, match=r"base model .* is gone"):
        store.load(path, model=loaded.model, optimizer=optimizer)
    tiny_model(base, layers=1, seed=8)
    with pytest.raises(CheckpointError, match="other weights now"):
        store.load(path, model=loaded.model, optimizer=optimizer)


def test_a_run_that_was_moved_with_its_base_finds_it(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "one" / "models" / "sft")
    loaded, optimizer = begin(tmp_path / "one" / "models" / "sft", LoraConfig(rank=2))
    path = save(tmp_path / "one" / "checkpoints", 1, loaded, optimizer)
    (tmp_path / "one").rename(tmp_path / "two")
    moved = tmp_path / "two" / path.relative_to(tmp_path / "one")
    assert store.find_base(moved, store.read_meta(moved)) == tmp_path / "two" / "models" / "sft"


def differing(tmp_path: Path, case: str) -> tuple[LoadedModel, Optimizer]:
    if case == "lora":
        return begin(tiny_model(tmp_path / "m", layers=1), LoraConfig(rank=4))
    if case == "optimiser":
        loaded, _ = begin(tiny_model(tmp_path / "m", layers=1))
        return loaded, torch.optim.SGD(loaded.model.parameters(), lr=1.0)
    if case == "groups":
        loaded, _ = begin(tiny_model(tmp_path / "m", layers=1))
        return loaded, torch.optim.AdamW(loaded.model.parameters())
    if case == "layers":
        return begin(tiny_model(tmp_path / "m", layers=2))
    return begin(tiny_model(tmp_path / "m", layers=1, hidden=32))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("lora", "its adapters are None, the model's are"),
        ("optimiser", "it is of AdamW, the optimiser is SGD"),
        ("groups", "it has 2 parameter groups, the optimiser 1"),
        ("layers", r"the model has 9 tensors that the checkpoint has not, the first is model.layers.1"),
        ("hidden", r"model.embed_tokens.weight is \[259, 64\] in the checkpoint, \[259, 32\] in the model"),
    ],
)
def test_what_does_not_fit_is_named(folder: Path, tmp_path: Path, case: str, message: str) -> None:
    loaded, optimizer = begin(folder)
    train(loaded, optimizer, 1)
    path = save(tmp_path / "run", 1, loaded, optimizer)
    other, second = differing(tmp_path, case)
    before = [parameter.detach().clone() for parameter in other.model.parameters()]
    with pytest.raises(CheckpointError, match=message):
        store.load(path, model=other.model, optimizer=second)
    assert all(torch.equal(a, b) for a, b in zip(before, other.model.parameters(), strict=True))


def test_a_checkpoint_without_optimiser_cannot_be_resumed(folder: Path, tmp_path: Path) -> None:
    loaded, optimizer = begin(folder)
    path = save(tmp_path, 1, loaded, None)
    with pytest.raises(CheckpointError, match="holds no optimiser"):
        store.load(path, model=loaded.model, optimizer=optimizer)
    store.load(path, model=loaded.model, optimizer=None)


def shard_of(path: Path) -> Path:
    return next((path / store.TENSORS).glob("*.distcp"))


def test_latest_goes_by_content(folder: Path, tmp_path: Path) -> None:
    loaded, optimizer = begin(folder)
    assert store.latest(tmp_path / "nowhere") is None
    paths = {step: save(tmp_path, step, loaded, optimizer) for step in (2, 9, 10, 30, 31, 32)}
    (tmp_path / "global_step_99").mkdir()
    (tmp_path / "latest").write_text("global_step_99")
    assert store.latest(tmp_path) == paths[32]
    (paths[32] / store.MARKER).unlink()
    assert store.latest(tmp_path) == paths[31]
    shard = shard_of(paths[31])
    shard.write_bytes(shard.read_bytes()[:-1])
    assert store.latest(tmp_path) == paths[30]
    (paths[30] / "state.json").unlink()
    assert store.latest(tmp_path) == paths[10]
    (paths[10] / store.MARKER).write_text("{")
    assert store.latest(tmp_path) == paths[9]


def test_what_is_not_whole_says_why(folder: Path, tmp_path: Path) -> None:
    loaded, optimizer = begin(folder)
    path = save(tmp_path, 1, loaded, optimizer)
    shard = shard_of(path)
    whole = shard.read_bytes()
    shard.write_bytes(whole[:100])
    with pytest.raises(CheckpointError, match=r"is not whole: tensors/__0_0.distcp has 100 bytes instead of"):
        store.load(path, model=loaded.model, optimizer=optimizer)
    shard.write_bytes(bytes(len(whole)))
    with pytest.raises(CheckpointError, match="the tensors cannot be read"):
        store.load(path, model=loaded.model, optimizer=optimizer)
    (path / store.MARKER).unlink()
    with pytest.raises(CheckpointError, match="never completed"):
        store.read_state(path)


def test_another_format_is_refused(folder: Path, tmp_path: Path) -> None:
    loaded, optimizer = begin(folder)
    path = save(tmp_path, 1, loaded, optimizer)
    text = (path / "meta.json").read_text()
    (path / "meta.json").write_text(text.replace('"format": 1', '"format": 7'))
    with pytest.raises(CheckpointError, match="has format 7; this version reads format 1"):
        store.read_meta(path)


def test_prune_keeps_the_newest_whole_ones(folder: Path, tmp_path: Path) -> None:
    loaded, optimizer = begin(folder)
    paths = {step: save(tmp_path, step, loaded, optimizer) for step in (1, 2, 3, 10)}
    (paths[3] / store.MARKER).unlink()
    assert store.prune(tmp_path, 2) == [paths[1]]
    assert sorted(store.prune(tmp_path, 1)) == [paths[2], paths[3]]
    assert store.latest(tmp_path) == paths[10]


def test_saving_a_step_again_replaces_it(folder: Path, tmp_path: Path) -> None:
    loaded, optimizer = begin(folder)
    save(tmp_path, 4, loaded, optimizer, state={"a": 1})
    path = save(tmp_path, 4, loaded, optimizer, state={"a": 2})
    assert store.read_state(path) == {"a": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["global_step_4"]


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """What a full disk does: a write fails with OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [100, 20_000], ids=["metadata", "tensors"])
def test_a_full_disk_leaves_the_last_one(folder: Path, tmp_path: Path, size: int) -> None:
    loaded, optimizer = begin(folder)
    first = save(tmp_path, 1, loaded, optimizer)
    with files_no_larger_than(size), pytest.raises(CheckpointError, match="could not be written"):
        save(tmp_path, 2, loaded, optimizer)
    assert [entry.name for entry in tmp_path.iterdir()] == ["global_step_1"]
    assert store.latest(tmp_path) == first


def test_readable_by_anybody_with_a_text_editor(folder: Path, tmp_path: Path) -> None:
    loaded, optimizer = begin(folder)
    path = save(tmp_path, 1, loaded, optimizer)
    assert json.loads((path / "run_config.json").read_text()) == {"seed": 5}
    assert json.loads((path / "state.json").read_text()) == {"position": 1}
    assert (path / "hf" / "config.json").is_file()
    assert (path / "hf" / "tokenizer.json").is_file()
