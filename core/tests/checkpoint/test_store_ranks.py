"""Several processes write one checkpoint, which any number of processes resumes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from posttune.checkpoint import dcp, store
from posttune.distributed.ranks import Ranks
from posttune.models.load import new_model
from posttune.models.tokenizer import byte_tokenizer

SCRIPT = r"""
import json, sys
from pathlib import Path

import torch

from posttune.checkpoint import store
from posttune.distributed.ranks import Ranks
from posttune.errors import CheckpointError
from posttune.models.load import new_model
from posttune.models.tokenizer import byte_tokenizer

root = Path(sys.argv[1])
ranks = Ranks.current("cpu", deadline_s=60)
tokenizer = byte_tokenizer()
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
model = new_model({"model_type": "llama", **sizes}, tokenizer, seed=0)
optimizer = torch.optim.AdamW(model.parameters())
model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
optimizer.step()


def save(folder):
    data = {"state": {"rank": ranks.rank}, "tokenizer": tokenizer, "config": {}, "ranks": ranks}
    return store.begin(folder, 1, model=model, optimizer=optimizer, **data).complete()


torch.manual_seed(100 + ranks.rank)
path = save(root / "run")
drawn = torch.rand(1).item()
torch.manual_seed(0)
state = store.load(path, model=model, optimizer=optimizer, ranks=ranks)
again = torch.rand(1).item()
(root / "file").write_text("")
try:
    save(root / "file" / "below")
    refused = ""
except CheckpointError as error:
    refused = str(error)
found = {"rank": ranks.rank, "state": state, "same": drawn == again, "drawn": drawn, "refused": refused}
(root / f"{ranks.rank}.json").write_text(json.dumps(found))
ranks.close()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    started = [
        subprocess.Popen(
            command, env={**common, "RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE, text=True
        )
        for rank in ("0", "1")
    ]
    for process in started:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [each["state"] for each in found] == [{"rank": 0}, {"rank": 0}]
    assert all(each["same"] for each in found)
    assert found[0]["drawn"] != found[1]["drawn"]  # each rank has its own generators
    assert all("could not be written" in each["refused"] for each in found)

    path = store.latest(tmp_path / "run")
    assert path is not None
    names = dcp.shapes(path / store.TENSORS)
    assert {name.split("/")[1] for name in names if name.startswith("rng/")} == {"0", "1"}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = new_model({"model_type": "llama", **sizes}, byte_tokenizer(), seed=7)
    optimizer = torch.optim.AdamW(model.parameters())
    for rank in (0, 1, 3):  # one process of another world; the fourth finds no generators of its own
        store.load(path, model=model, optimizer=optimizer, ranks=Ranks(rank=rank))
    weights = [file for file in (path / store.TENSORS).iterdir() if file.suffix == ".distcp"]
    whole = sum(file.stat().st_size for file in weights)
    one = store.begin(
        tmp_path / "alone",
        1,
        model=model,
        optimizer=optimizer,
        state={},
        tokenizer=byte_tokenizer(),
        config={},
    ).complete()
    alone = sum(file.stat().st_size for file in (one / store.TENSORS).glob("*.distcp"))
    assert whole < 1.5 * alone  # what both ranks hold is written once
