"""A checkpoint from a stranger executes nothing."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from posttune.checkpoint import dcp, store
from posttune.checkpoint.sources import open_source
from posttune.errors import CheckpointError
from posttune.models.load import new_model
from posttune.models.tokenizer import byte_tokenizer
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata


class Hostile:
    """Its unpickling makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.marker}",))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    tokenizer = byte_tokenizer()
    model = new_model({"model_type": "llama", **sizes}, tokenizer, seed=0)
    return store.begin(
        tmp_path, 1, model=model, optimizer=None, state={}, tokenizer=tokenizer, config={}
    ).complete()


def replace(checkpoint: Path, name: str, data: bytes) -> None:
    """Put a file in, with a marker that agrees."""
    (checkpoint / name).write_bytes(data)
    marker = checkpoint / store.MARKER
    sizes = json.loads(marker.read_text())
    marker.write_text(json.dumps(sizes | {name: len(data)}))


def index_of(checkpoint: Path) -> Metadata:
    return dcp.read_index(checkpoint / store.TENSORS)


def test_control_the_pickle_is_dangerous(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Hostile(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("place", ["alone", "inside"])
def test_hostile_index(checkpoint: Path, tmp_path: Path, place: str) -> None:
    marker = tmp_path / "marker"
    payload: Any = Hostile(marker)
    if place == "inside":
        index = index_of(checkpoint)
        index.planner_data = payload
        payload = index
    replace(checkpoint, "tensors/.metadata", pickle.dumps(payload))
    with pytest.raises(CheckpointError, match=r"names posix.system"):
        open_source(checkpoint).load_model()
    assert not marker.exists()


@pytest.mark.parametrize("name", ["Size.__init__.__globals__", "load", "hub.load", "serialization.load"])
def test_dotted_and_other_names_of_torch_are_refused(checkpoint: Path, name: str) -> None:
    module, attribute = b"torch", name.encode()
    stolen = (
        b"\x80\x04\x8c"
        + bytes([len(module)])
        + module
        + b"\x8c"
        + bytes([len(attribute)])
        + attribute
        + b"\x93."
    )
    replace(checkpoint, "tensors/.metadata", stolen)
    with pytest.raises(CheckpointError, match="is refused"):
        index_of(checkpoint)


def test_hostile_tensor(checkpoint: Path, tmp_path: Path) -> None:
    marker, shard = tmp_path / "marker", next((checkpoint / "tensors").glob("*.distcp"))
    torch.save(Hostile(marker), tmp_path / "payload")
    payload = (tmp_path / "payload").read_bytes()
    index = index_of(checkpoint)
    for info in index.storage_data.values():
        info.offset, info.length = 0, len(payload)
    replace(checkpoint, "tensors/.metadata", pickle.dumps(index))
    replace(checkpoint, f"tensors/{shard.name}", payload)
    with pytest.raises(CheckpointError, match="the tensors cannot be read"):
        open_source(checkpoint).load_model()
    assert not marker.exists()


def test_entries_that_are_no_tensors_are_refused(checkpoint: Path) -> None:
    index = index_of(checkpoint)
    index.state_dict_metadata["model/lm_head.weight"] = BytesStorageMetadata()
    replace(checkpoint, "tensors/.metadata", pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"'model/lm_head.weight' is no tensor"):
        open_source(checkpoint).load_model()


@pytest.mark.parametrize("path", ["../../secret", "/etc/passwd", ".."])
def test_files_elsewhere_are_refused(checkpoint: Path, path: str) -> None:
    index = index_of(checkpoint)
    for info in index.storage_data.values():
        info.relative_path = path
    replace(checkpoint, "tensors/.metadata", pickle.dumps(index))
    with pytest.raises(CheckpointError, match="points to a file elsewhere"):
        open_source(checkpoint).load_model()


@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"not a pickle", pickle.dumps([1, 2]), pickle.dumps({})])
def test_damaged_index(checkpoint: Path, data: bytes) -> None:
    replace(checkpoint, "tensors/.metadata", data)
    with pytest.raises(CheckpointError, match="is refused"):
        open_source(checkpoint).load_model()


@pytest.mark.parametrize("seed", range(4))
def test_any_damage_is_an_error_of_the_checkpoint(checkpoint: Path, seed: int) -> None:
    """Bytes of the index changed at random: it is read as it was, or refused; never another error."""
    original = (checkpoint / "tensors" / ".metadata").read_bytes()
    draw = random.Random(seed)
    refused = 0
    for _ in range(150):
        data = bytearray(original)
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        replace(
            checkpoint,
            "tensors/.metadata",
            bytes(data[: draw.choice([len(data), draw.randrange(len(data))])]),
        )
        try:
            shapes = dcp.shapes(checkpoint / store.TENSORS)
            small = {name: each for name, each in shapes.items() if 0 <= math.prod(each[0]) < 10**6}
            wanted = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in small.items()}
            dcp.read_into(checkpoint / store.TENSORS, wanted)
        except CheckpointError:
            refused += 1
    assert refused > 50
