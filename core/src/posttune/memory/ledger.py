"""The ledger: what memory each phase of a step took, and who holds how much of it.

There is one for the process, because the memory is the process's.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from posttune.memory.residence import host_bytes
from posttune.optim.states import state_bytes

MIB = 2**20


@dataclass
class Row:
    """One phase, in bytes. On a CPU ``allocated`` is the process's resident memory."""

    allocated: int = 0  # at its end
    reserved: int = 0  # by torch's allocator, at its end; on a CPU 0
    peak: int = 0  # of what is allocated; on a CPU of the process since its start
    used: int = 0  # of the whole device, by whomever, at its end; on a CPU 0


@dataclass(frozen=True)
class Tenant:
    """A model and its optimiser, as long as they live."""

    model: ref[nn.Module]
    optimizer: ref[Optimizer] | None


class Ledger:
    """Collects rows while steps run."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.phases: dict[str, Row] = {}
        self.engine = 0  # bytes that starting the engine took on the device
        self.gradients = 0  # bytes, where they were most in this step
        self.failed = ""  # the phase that an error left
        self._tenants: dict[str, Tenant] = {}
        self._running: list[Row] = []
        self._names: list[str] = []
        self._step = Row()

    @property
    def present(self) -> str:
        """The innermost phase that runs, else nothing."""
        names = self._names[-1:]  # in one go: another thread may look
        return names[0] if names else ""

    def watch(self, name: str, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Count a model's weights, and its optimiser's moments, from now on."""
        self._tenants[name] = Tenant(ref(model), None if optimizer is None else ref(optimizer))

    def restart(self, device: torch.device) -> None:
        """A step begins."""
        self.device, self.gradients, self.failed = device, 0, ""
        self.phases, self._running, self._names, self._step = {}, [], [], Row()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block. A phase within another counts in both; one that comes again, once more."""
        self._fold()
        self._running.append(Row())
        self._names.append(name)
        try:
            yield
        except BaseException:
            self.failed = self.failed or name
            raise
        finally:
            self._fold()
            self._names.pop()
            self._note(name, self._running.pop())

    def _note(self, name: str, row: Row) -> None:
        row.allocated, row.reserved, row.used = now(self.device)
        outer = self._running[-1] if self._running else self._step
        outer.peak = max(outer.peak, row.peak)
        seen = self.phases.setdefault(name, row)
        for field in ("allocated", "reserved", "peak", "used"):
            setattr(seen, field, max(getattr(seen, field), getattr(row, field)))

    def _fold(self) -> None:
        """Give the peak so far to the innermost phase, and let a GPU's begin anew."""
        row = self._running[-1] if self._running else self._step
        row.peak = max(row.peak, peak(self.device))
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    @contextmanager
    def starting_engine(self, device: torch.device) -> Iterator[None]:
        """Measure what the engine takes on the device, its weights and its cache."""
        before = now(device)[2]
        yield
        self.engine = max(0, now(device)[2] - before)

    def note_gradients(self, count: int) -> None:
        """``count`` bytes of gradients exist."""
        self.gradients = max(self.gradients, count)

    def holders(self) -> dict[str, int]:
        """Bytes of weights, moments, gradients, the engine and what waits in the host's memory."""
        models = [tenant.model() for tenant in self._tenants.values()]
        moments = [tenant.optimizer() for tenant in self._tenants.values() if tenant.optimizer is not None]
        weights = {id(p): p.nbytes for m in models if m is not None for p in m.parameters()}
        return {
            "weights": sum(weights.values()),
            "optimizer": sum(state_bytes(each) for each in moments if each is not None),
            "gradients": self.gradients,
            "engine": self.engine,
            "offloaded": host_bytes(),
        }

    def metrics(self) -> dict[str, float]:
        """``memory/...`` of the step, MiB."""
        self._fold()
        found = {"memory/peak_mb": self._step.peak / MIB}
        for name, row in self.phases.items():
            if self.device.type == "cuda":
                found |= {
                    f"memory/{name}/allocated_mb": row.allocated / MIB,
                    f"memory/{name}/reserved_mb": row.reserved / MIB,
                    f"memory/{name}/device_used_mb": row.used / MIB,
                    f"memory/{name}/peak_mb": row.peak / MIB,
                }
            else:
                found[f"memory/{name}/rss_mb"] = row.allocated / MIB
        return found | {f"memory/{name}_mb": count / MIB for name, count in self.holders().items() if count}

    def table(self) -> str:
        """The ledger as text."""
        gpu = self.device.type == "cuda"
        head = (
            ("phase", "allocated", "reserved", "peak", "device used")
            if gpu
            else ("phase", "resident", "peak")
        )
        lines = ["  ".join(f"{text:>14}" for text in head) + "   MiB"]
        for name, row in self.phases.items():
            columns = [row.allocated, row.reserved, row.peak, row.used] if gpu else [row.allocated, row.peak]
            mark = "   <- here" if name == self.failed else ""
            lines.append("  ".join([f"{name:>14}", *(f"{n / MIB:>14,.0f}" for n in columns)]) + mark)
        held = ", ".join(f"{name} {count / MIB:,.0f}" for name, count in self.holders().items() if count)
        return "\n".join([*lines, f"held by: {held or 'nobody yet'}"])


def now(device: torch.device) -> tuple[int, int, int]:
    """Bytes allocated, reserved, and used of the whole device; on a CPU the resident memory, 0, 0."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), total - free
    return _resident(), 0, 0


def peak(device: torch.device) -> int:
    """Highest bytes: of a GPU's allocator since it was reset, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
    return found if sys.platform == "darwin" else found * 1024


def _resident() -> int:
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        return pages * resource.getpagesize()
    return peak(torch.device("cpu"))


LEDGER = Ledger()
