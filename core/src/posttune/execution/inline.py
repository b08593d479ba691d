"""One call after another in this thread; calls of async rewards side by side in one event loop."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from posttune.errors import PosttuneError
from posttune.execution.outcome import Call, Checked, Limits, Outcome, Unit

T = TypeVar("T")


def run_inline(call: Call, units: Sequence[Unit], limits: Limits) -> list[Outcome]:
    """Call for each unit in order. A call cannot be stopped; past the deadline no other is begun."""
    outcomes: list[Outcome] = []
    for unit in units:
        if limits.deadline is not None and time.monotonic() >= limits.deadline:
            outcomes.append(Outcome(late=True))
            continue
        outcomes.append(timed(call, unit))
        if outcomes[-1].error is not None and limits.fail_fast:
            break
    return outcomes


def timed(call: Call, unit: Unit) -> Outcome:
    """One call, and what it took."""
    began = time.monotonic()
    try:
        checked = call(unit)
    except PosttuneError as error:
        return Outcome(time.monotonic() - began, error=error)
    return Outcome(time.monotonic() - began, checked)


Start = Callable[[Unit], Awaitable[object]]
Check = Callable[[Unit, object], Checked]


def run_async(
    start: Start, check: Check, units: Sequence[Unit], limits: Limits, workers: int
) -> list[Outcome]:
    """At most ``workers`` calls at a time. A call that awaits is cancelled at its deadline.

    One that blocks the loop instead, or that refuses to be cancelled, cannot be stopped.
    """
    return run_coroutine(_gather(start, check, units, limits, workers))


async def _gather(
    start: Start, check: Check, units: Sequence[Unit], limits: Limits, workers: int
) -> list[Outcome]:
    slots = asyncio.Semaphore(workers)
    tasks = [asyncio.create_task(_one(start, check, unit, limits, slots)) for unit in units]
    remaining = None if limits.deadline is None else max(0.0, limits.deadline - time.monotonic())
    try:
        await asyncio.wait(tasks, timeout=remaining, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()  # does nothing to one that is done
    return [_outcome(task) for task in tasks]


def _outcome(task: asyncio.Task[Outcome]) -> Outcome:
    if not task.done() or task.cancelled():
        return Outcome(late=True)
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, PosttuneError):
        return Outcome(error=error)
    raise error


async def _one(start: Start, check: Check, unit: Unit, limits: Limits, slots: asyncio.Semaphore) -> Outcome:
    async with slots:
        began = time.monotonic()
        try:
            async with asyncio.timeout(limits.of(unit)) as clock:
                answers = await start(unit)
            checked = check(unit, answers)
        except PosttuneError as error:
            if limits.fail_fast:
                raise
            return Outcome(time.monotonic() - began, error=error)
        except TimeoutError:  # a reward's own has become a PluginCallError
            assert clock.expired()
            return Outcome(time.monotonic() - began)
        return Outcome(time.monotonic() - began, checked)


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine; in a thread of its own where a loop runs already (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    context = contextvars.copy_context()
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(lambda: context.run(asyncio.run, coroutine)).result()


def settled(answers: object) -> object:
    """What an awaitable comes to; anything else as it is."""
    return run_coroutine(_awaited(answers)) if inspect.isawaitable(answers) else answers


async def _awaited(answers: Awaitable[T]) -> T:
    return await answers
