"""Several gloo processes that run stages of the toy task, and what must come out alike."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.multiprocessing as mp
import trainer_toy as toy
from posttune.config.parallel import ParallelConfig
from posttune.distributed.ranks import Ranks
from posttune.facade import RolloutEngine
from posttune.types import Completion, Request, Sampling
from safetensors.torch import load_file

TOLERANCE = 1e-5
DEPENDS_ON_PACKING = {"update/padding_fraction", "update/tokens_per_row", "update/attention_waste"}
OF_SEVERAL = {"rollout/rank_imbalance", "update/rank_imbalance"}
"""Metrics that one process has not."""
SMOOTH = {"eps": 1e-3}
"""For Adam: with a small eps it turns the rounding of a tiny gradient into a step of lr."""


@dataclass(frozen=True)
class Job:
    """One stage to run in ``output``."""

    output: Path
    stage: Mapping[str, Any]
    parallel: Mapping[str, Any] = field(default_factory=dict)
    resume: bool = False
    recorded: Path | None = None  # answers of another run, which the engine gives in place of its own

    def run(self, ranks: Ranks | None = None) -> None:
        """The stage, by this process."""
        with replayed(self.recorded):
            toy.run_stage(self.output, self.stage, ranks=ranks, resume=self.resume)


def run_ranks(world: int, jobs: Sequence[Job]) -> None:
    """The jobs, one after the other, by ``world`` processes."""
    plain = json.dumps([asdict(job) for job in jobs], default=str)
    mp.spawn(_worker, args=(world, _free_port(), plain), nprocs=world)  # type: ignore[no-untyped-call]


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _worker(rank: int, world: int, port: int, jobs: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = Ranks()
    for fields in json.loads(jobs):
        job = Job(**fields)
        parallel = ParallelConfig.model_validate(job.parallel)
        ranks = Ranks.current("cpu", parallel=parallel, deadline_s=120)
        recorded = None if job.recorded is None else Path(job.recorded)
        Job(Path(job.output), job.stage, job.parallel, job.resume, recorded).run(ranks)
    ranks.close()


@contextmanager
def recording(path: Path) -> Iterator[None]:
    """Write down every answer that an engine gives inside the block."""
    plain = RolloutEngine.generate
    found: dict[str, list[Any]] = {}

    def generate(self: RolloutEngine, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        answers = plain(self, requests, sampling)
        keys = _keys(self, requests, sampling)
        found.update({key: list(astuple(answer)) for key, answer in zip(keys, answers, strict=True)})
        return answers

    with patch.object(RolloutEngine, "generate", generate):
        yield
    path.write_text(json.dumps(found))


def run_alone(folder: Path, stages: Mapping[str, Mapping[str, Any]]) -> Path:
    """One process's run folder of every stage in ``folder``, and beside each what its engine answered."""
    for name, stage in stages.items():
        with recording(folder / f"{name}.json"):
            Job(folder / name, stage).run()
    return folder


@contextmanager
def replayed(path: Path | None) -> Iterator[None]:
    """Answer with what another run wrote down; nothing is generated."""
    if path is None:
        yield
        return
    found = json.loads(path.read_text())

    def generate(self: RolloutEngine, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return [_restored(*found[key]) for key in _keys(self, requests, sampling)]

    with patch.object(RolloutEngine, "generate", generate):
        yield


def _keys(engine: RolloutEngine, requests: Sequence[Request], sampling: Sampling) -> list[str]:
    start = f"{engine.version}/{sampling.temperature}"
    return [f"{start}/{request.id}/{index}" for request in requests for index in range(sampling.n)]


def _restored(
    request_id: str, index: int, ids: list[int], logprobs: list[float] | None, reason: Any, version: int
) -> Completion:
    told = None if logprobs is None else tuple(logprobs)
    return Completion(request_id, index, tuple(ids), told, reason, version)


def assert_equal_runs(one: Path, other: Path, stage: str) -> None:
    """Metrics, samples and the model that is left, all within the tolerance."""
    assert_equal_metrics(one, other)
    assert_equal_rollouts(one, other)
    assert_equal_models(one / "models" / stage, other / "models" / stage)


def assert_equal_metrics(one: Path, two: Path) -> None:
    """Every metric of every step."""
    first, second = toy.metrics(one), toy.metrics(two)
    assert len(first) == len(second) > 0
    for line, other in zip(first, second, strict=True):
        found = toy.comparable(line)
        assert found.keys() - OF_SEVERAL == toy.comparable(other).keys() - OF_SEVERAL
        for name in found.keys() - DEPENDS_ON_PACKING - OF_SEVERAL - {"stage"}:
            bound = TOLERANCE * max(1.0, abs(found[name]))
            assert abs(other[name] - found[name]) <= bound, (name, found[name], other[name])


def assert_equal_rollouts(one: Path, two: Path) -> None:
    """Every sample: the same tokens, and what was made of them."""
    tables, others = toy.rollouts(one), toy.rollouts(two)
    assert list(tables) == list(others)
    for name, table in tables.items():
        same = ["step", "prompt_id", "completion_ids", "finish_reason", "weight_version", "reward"]
        # refills of several ranks come in the order of the ranks
        table, other = (each.sort_by([("prompt_id", "ascending")]) for each in (table, others[name]))
        assert table.select(same).equals(other.select(same))
        for column in ("advantage", "logprobs"):
            values = [
                torch.tensor(each.column(column).combine_chunks().flatten().to_numpy())
                for each in (table, other)
            ]
            assert torch.allclose(*values, atol=1e-4), column


def assert_equal_models(one: Path, two: Path) -> None:
    """The exported weights."""
    tensors, others = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.allclose(tensor, others[name], atol=TOLERANCE), name
