"""SymPy in processes of their own, which can be killed.

A thread cannot be stopped, so whatever SymPy may take long over runs in ``posttune.workers``. Nothing is
started before the first question.
"""

from __future__ import annotations

from posttune.workers import OutOfTime, Pool, WorkerDied

__all__ = ["OutOfTime", "WorkerDied", "pool"]

_pool = Pool("posttune_sympy._symbolic:answer", memory_mb=2048)


def pool() -> Pool:
    """The workers of this process."""
    return _pool
