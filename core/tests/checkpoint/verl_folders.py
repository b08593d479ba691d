"""Folders as verl leaves them, made by real gloo processes from a model of transformers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

SCRIPT = r"""
import json, os, sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from safetensors.torch import load_file

jobs = json.loads(sys.argv[1])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")


def cut(tensor, mesh, placements):
    return distribute_tensor(tensor, mesh, placements)


def strided(tensor, mesh):
    # what fully_shard makes of a weight that tensor parallelism has cut along the same dimension
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    linear = torch.nn.Linear(tensor.shape[1], tensor.shape[0], bias=False)
    linear.weight = torch.nn.Parameter(tensor.clone(), requires_grad=False)
    box = torch.nn.Sequential(linear)
    parallelize_module(box, mesh["fsdp"], {"0": ColwiseParallel()})
    fully_shard(box, mesh=mesh["ddp"])
    return box.state_dict()["0.weight"].detach()


for job in jobs:
    weights = torch.load(job["weights"], weights_only=True)
    flat = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ddp", "fsdp")) if world == 4 else None
    kinds = {
        "shard0": lambda t: cut(t, flat, [Shard(0)]),
        "shard1": lambda t: cut(t, flat, [Shard(t.ndim - 1)]),
        "replicate": lambda t: cut(t, flat, [Replicate()]),
        "hsdp": lambda t: cut(t, grid, [Replicate(), Shard(0)]),
        "both": lambda t: cut(t, grid, [Shard(0), Shard(t.ndim - 1)]),
        "twice": lambda t: cut(t, grid, [Shard(0), Shard(0)]),
        "strided": lambda t: strided(t, grid) if t.ndim == 2 else cut(t, grid, [Replicate(), Shard(0)]),
    }
    place = kinds[job["kind"]]
    shards = {}
    for name, tensor in weights.items():
        plain = name in job["plain"] or tensor.ndim == 0
        shards[name] = tensor if plain else place(tensor)
    torch.save(shards, Path(job["folder"]) / f"model_world_size_{world}_rank_{rank}.pt")
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def save_shards(jobs: list[dict[str, object]], world: int) -> None:
    """Let ``world`` processes save what the jobs say, each into a folder of its own."""
    common = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", SCRIPT, json.dumps(jobs)]
    started = [
        subprocess.Popen(command, env={**common, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    for process in started:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors


def job(folder: Path, weights: Path, kind: str, plain: tuple[str, ...] = ()) -> dict[str, object]:
    """A folder to be filled: ``weights`` cut as ``kind``, those of ``plain`` left whole on every rank."""
    folder.mkdir(parents=True)
    return {"folder": str(folder), "weights": str(weights), "kind": kind, "plain": list(plain)}
