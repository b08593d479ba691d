"""One process needs no group; two over gloo add up, share and wait."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from posttune.distributed.ranks import BUCKET_ELEMENTS, Ranks, _buckets
from posttune.errors import RunError, UserError
from posttune.trainer.metrics import Meter

pytestmark = pytest.mark.slow


def test_one_process_is_the_identity() -> None:
    ranks = Ranks()
    tensor = torch.tensor([1.0, 2.0])
    assert ranks.sum(tensor) is tensor
    assert ranks.share([1, 2, 3]) == [1, 2, 3]
    assert ranks.gather_objects(["a"]) == ["a"]
    assert ranks.exchanged(["a"]) == ["a"]
    assert ranks.broadcast_object("x") == "x"
    assert ranks.any(True)
    assert not ranks.any(False)
    ranks.barrier("nothing to wait for")
    ranks.close()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [0, 1, 5, 8])
def test_shares_are_contiguous_and_whole(world: int, size: int) -> None:
    items = list(range(size))
    shares = [Ranks(rank, world).share(items) for rank in range(world)]
    assert [item for share in shares for item in share] == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_buckets_keep_order_and_one_dtype() -> None:
    shapes = [(3,), (BUCKET_ELEMENTS,), (2,), (2,)]
    grads = [torch.zeros(shape) for shape in shapes] + [torch.zeros(2, dtype=torch.bfloat16)]
    buckets = list(_buckets(grads))
    assert [grad for bucket in buckets for grad in bucket] == grads or all(
        a is b for a, b in zip((g for bucket in buckets for g in bucket), grads, strict=True)
    )
    assert [len(bucket) for bucket in buckets] == [1, 1, 2, 1]


@pytest.mark.parametrize("name", ["cpu:notanumber", "abacus"])
def test_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="device"):
        Ranks.current(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="finds no GPU"):
        Ranks.current("cuda")


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What a launcher sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def exchange(rank: int, world: int, port: int, folder: str) -> None:
    os.environ |= environment(rank, world, port)
    ranks = Ranks.current("cpu", deadline_s=60)
    assert (ranks.rank, ranks.world, ranks.main) == (rank, world, rank == 0)
    _check_tensors(ranks)
    _check_objects(ranks)
    _check_metrics(ranks)
    _check_files(ranks, Path(folder))
    ranks.close()


def _check_tensors(ranks: Ranks) -> None:
    mine = torch.tensor([1.0, ranks.rank], dtype=torch.float64)
    assert ranks.sum(mine).tolist() == [2.0, 1.0]
    assert mine.tolist() == [1.0, ranks.rank]
    params = [torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(3))]
    for number, param in enumerate(params):
        param.grad = torch.full_like(param, ranks.rank + 10.0 * number)
    ranks.sum_grads(params)
    assert params[0].grad is not None
    assert params[0].grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert params[1].grad is not None
    assert params[1].grad.tolist() == [21.0] * 3


def _check_objects(ranks: Ranks) -> None:
    assert ranks.gather_objects([ranks.rank, "x"]) == ([0, "x", 1, "x"] if ranks.main else [])
    assert ranks.all_objects(ranks.rank) == [0, 1]
    items = [f"{ranks.rank} to {share}" * (1 + 1000 * share) for share in range(2)]
    found = ranks.exchanged(items)
    assert found[ranks.rank] is items[ranks.rank]
    assert found == [f"{share} to {ranks.rank}" * (1 + 1000 * ranks.rank) for share in range(2)]
    assert ranks.broadcast_object({"rank": ranks.rank}) == {"rank": 0}
    assert ranks.any(ranks.rank == 1)


def _check_metrics(ranks: Ranks) -> None:
    meter = Meter()
    meter.mean("loss", ranks.rank * 6.0, ranks.rank + 1)
    if not ranks.main:
        meter.spread("only/second", [1.0, 3.0])
    expected = {"loss": 2.0, "only/second/mean": 2.0, "only/second/std": 1.0}
    assert meter.reduce(ranks) == expected


def _check_files(ranks: Ranks, folder: Path) -> None:
    with ranks.main_first("write"):
        if ranks.main:
            (folder / "written").touch()
        assert (folder / "written").exists()


def miss_a_barrier(rank: int, world: int, port: int) -> None:
    os.environ |= environment(rank, world, port)
    ranks = Ranks.current("cpu", deadline_s=3)
    if ranks.main:
        with pytest.raises(RunError, match=r"'export' within 3 s.*\b1\b"):
            ranks.barrier("export")


def test_two_processes(tmp_path: Path) -> None:
    mp.spawn(exchange, args=(2, free_port(), str(tmp_path)), nprocs=2)  # type: ignore[no-untyped-call]


def test_a_rank_that_misses_a_barrier_is_named_before_the_deadline_is_long_over() -> None:
    mp.spawn(miss_a_barrier, args=(2, free_port()), nprocs=2)  # type: ignore[no-untyped-call]
