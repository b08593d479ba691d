"""Metrics of a step, gathered as sums and counts so that any split over micro-batches and ranks agrees."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from posttune.distributed import watch
from posttune.distributed.ranks import Ranks
from posttune.memory.ledger import LEDGER

Number = float | int | torch.Tensor


class Meter:
    """Collects a step's quantities on this rank; ``reduce`` combines the ranks, in float64.

    Tensors are kept as they are until then, so that a GPU is not waited for in between.
    """

    def __init__(self) -> None:
        self._means: dict[str, list[tuple[Number, Number]]] = {}
        self._spreads: dict[str, list[float]] = {}
        self._sums: dict[str, list[Number]] = {}
        self._peaks: dict[str, list[Number]] = {}
        self._weights: dict[str, list[tuple[float, float, float]]] = {}
        self._times: dict[str, float] = {}

    def mean(self, name: str, total: Number, count: Number = 1) -> None:
        """Add to the mean ``total / count``; absent in the end where the count stays 0."""
        self._means.setdefault(name, []).append((_kept(total), _kept(count)))

    def spread(self, name: str, values: Iterable[float]) -> None:
        """Add values whose mean and standard deviation (population) appear as ``name/mean``, ``name/std``."""
        self._spreads.setdefault(name, []).extend(values)

    def weights(self, name: str, total: float, squares: float, count: float) -> None:
        """Add importance weights w, whose effective share of samples appears: (sum w)^2 / (n sum w^2)."""
        self._weights.setdefault(name, []).append((total, squares, count))

    def sum(self, name: str, value: Number) -> None:
        """Add to a sum over everything and all ranks."""
        self._sums.setdefault(name, []).append(_kept(value))

    def peak(self, name: str, value: Number) -> None:
        """Keep the largest value, over ranks too."""
        self._peaks.setdefault(name, []).append(_kept(value))

    def took(self, name: str, seconds: float) -> None:
        """Add wall time of work that ran beside this process's own to ``time/<name>_s``."""
        key = f"time/{name}_s"
        self._times[key] = self._times.get(key, 0.0) + seconds

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the block's wall time to ``time/<name>_s`` (the slowest rank's), its memory to the ledger."""
        started = time.perf_counter()
        with watch.doing(name), nullcontext() if name == "step" else LEDGER.phase(name):
            yield
        self.took(name, time.perf_counter() - started)

    def reduce(self, ranks: Ranks) -> dict[str, float]:
        """The step's metrics, equal on every rank."""
        return combine(ranks.all_objects(self.local()))

    def local(self) -> Local:
        """What this rank contributes."""
        return Local(
            means={name: _pair(pairs) for name, pairs in self._means.items()},
            spreads={name: _moments(values) for name, values in self._spreads.items()},
            weights={
                name: [math.fsum(part) for part in zip(*found, strict=True)]
                for name, found in self._weights.items()
            },
            sums={name: [sum(map(float, values))] for name, values in self._sums.items()},
            peaks={name: max(map(float, values)) for name, values in self._peaks.items()} | self._times,
        )


@dataclass(frozen=True)
class Local:
    """What one rank contributes."""

    means: dict[str, list[float]]  # sum, count
    spreads: dict[str, list[float]]  # sum, sum of squares, count
    weights: dict[str, list[float]]  # sum, sum of squares, count
    sums: dict[str, list[float]]
    peaks: dict[str, float]


def combine(parts: Sequence[Local]) -> dict[str, float]:
    """The metrics of all ranks together."""
    result: dict[str, float] = {}
    for name, (total, count) in _added(part.means for part in parts).items():
        result |= {name: total / count} if count else {}
    for name, (total, squares, count) in _added(part.spreads for part in parts).items():
        result |= _mean_and_std(name, total, squares, count) if count else {}
    for name, (total, squares, count) in _added(part.weights for part in parts).items():
        result |= {name: total * total / (count * squares)} if squares else {}
    result |= {name: total for name, (total,) in _added(part.sums for part in parts).items()}
    for part in parts:
        for name, value in part.peaks.items():
            result[name] = max(result.get(name, -math.inf), value)
    return result


def _kept(value: Number) -> Number:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _pair(pairs: Sequence[tuple[Number, Number]]) -> list[float]:
    return [sum(float(total) for total, _ in pairs), sum(float(count) for _, count in pairs)]


def _moments(values: Sequence[float]) -> list[float]:
    return [sum(values), sum(value * value for value in values), float(len(values))]


def _mean_and_std(name: str, total: float, squares: float, count: float) -> dict[str, float]:
    mean = total / count
    return {f"{name}/mean": mean, f"{name}/std": math.sqrt(max(0.0, squares / count - mean * mean))}


def _added(parts: Iterable[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    total: dict[str, list[float]] = {}
    for part in parts:
        for name, values in part.items():
            before = total.get(name, [0.0] * len(values))
            total[name] = [a + b for a, b in zip(before, values, strict=True)]
    return total


def reset_peak_memory(device: torch.device) -> None:
    """Begin a step's ledger. The peak of a GPU begins anew; that of a process cannot."""
    LEDGER.restart(device)


def note_memory(meter: Meter) -> None:
    """The ledger of the step so far: ``memory/...``, MiB, of the rank that has most."""
    for name, value in LEDGER.metrics().items():
        meter.peak(name, value)
