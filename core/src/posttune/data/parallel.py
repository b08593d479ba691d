"""One function over many inputs, in the order of the inputs, in several processes or threads where that pays.

The processes are forked, so that what the function holds (a tokenizer, a plugin) is there without
being sent. Where a platform cannot fork, all is done here. Threads serve what spends its time in libraries
that let other threads run meanwhile: nothing is sent to and fro, and no memory is held twice.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from posttune.errors import RunError

In = TypeVar("In")
Out = TypeVar("Out")

AHEAD = 2  # inputs that wait for every process: the memory does not grow with their number
GARBAGE = 200_000  # objects after which a worker looks for cycles

_function: Callable[[Any], Any]  # of a worker; set once when it starts


def processors() -> int:
    """How many processes can run at the same time here."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(function: Callable[[In], Out], inputs: Iterable[In], jobs: int) -> Iterator[Out]:
    """``function`` of every input, in order. An error comes where its output would have come.

    Inputs and outputs must be picklable where ``jobs`` is above 1. Raises `RunError` where a process died.
    """
    if jobs < 2 or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(function, inputs)
        return
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_start, initargs=(function,))
    try:
        yield from submitted_map(pool, _apply, inputs, jobs)
    except BrokenProcessPool as error:
        what = "a process that converted data died; it may have run out of memory"
        raise RunError(what, who="data convert", fix="try again with one process (--jobs 1)") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def submitted_map(
    pool: Executor, function: Callable[[In], Out], inputs: Iterable[In], jobs: int
) -> Iterator[Out]:
    """``function`` of every input in the pool, in order, a few inputs ahead of what was yielded."""
    waiting: deque[Future[Out]] = deque()
    for item in inputs:
        waiting.append(pool.submit(function, item))
        if len(waiting) > jobs * AHEAD:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _start(function: Callable[[Any], Any]) -> None:
    global _function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent alone answers Ctrl-C
    _function = function
    gc.freeze()  # what was there before stays: looking through it again and again costs much
    gc.set_threshold(GARBAGE)


def _apply(item: Any) -> Any:
    return _function(item)
