"""Calling a reward function by the names of its arguments, one sample or all at once.

A parameter named ``prompt``, ``response``, ``reference`` or ``samples`` gets what it says; any other
gets the data column of its name, and ``**columns`` gets all the remaining ones.
"""

from __future__ import annotations

import asyncio
import inspect
import sysconfig
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Any

from posttune.errors import DataError, UserError
from posttune.execution import clock
from posttune.types import Needs, Sample, Score

Answers = Sequence[Score] | Awaitable[Sequence[Score]]

ROLES = ("prompt", "response", "reference")
BATCH = "samples"
_PACKAGE = str(Path(__file__).parents[1])
_LIBRARY = sysconfig.get_path("stdlib")
SIGNATURES = "(prompt, response), (prompt, response, reference) or (samples), and data columns by name"


@dataclass(frozen=True)
class Binding:
    """A reward function and what it takes."""

    function: Callable[..., Any]
    who: str
    batch: bool  # takes all samples at once
    wanted: tuple[str, ...] = ()  # by name: roles and columns
    required: tuple[str, ...] = ()  # those of them without a default
    all_columns: bool = False
    asynchronous: bool = False

    @property
    def needs(self) -> Needs:
        """What the data must have."""
        return Needs(
            columns=tuple(name for name in self.required if name not in ROLES),
            reference="reference" in self.required,
            each=not self.batch,
            reads=None if self.batch or self.all_columns else tuple(sorted(set(self.wanted) - set(ROLES))),
            asynchronous=self.asynchronous,
        )

    def score(self, samples: Sequence[Sample]) -> Answers:
        """One score a sample, in order; an awaitable of them where the function is async."""
        if self.batch:
            return self._score_all(samples)
        return _settled([_timed(self._score_one, sample) for sample in samples])

    def _score_all(self, samples: Sequence[Sample]) -> Answers:
        try:
            answers: Answers = self.function(samples)
        except Exception as error:
            error.add_note(_place(error))
            raise
        return _placed(answers) if inspect.isawaitable(answers) else answers

    def _score_one(self, sample: Sample) -> Any:
        return self.function(**self.arguments(sample))

    def arguments(self, sample: Sample) -> dict[str, Any]:
        """The keyword arguments for one sample. Raises DataError where the sample lacks one."""
        available: Mapping[str, Any] = {
            **sample.columns,
            "prompt": sample.prompt,
            "response": sample.response,
            "reference": sample.reference,
        }
        for name in self.required:
            if available.get(name) is None and (name == "reference" or name not in available):
                raise self._lacking(sample, name)
        if self.all_columns:
            unwanted = set(ROLES) - set(self.wanted)
            return {name: value for name, value in available.items() if name not in unwanted}
        return {name: available[name] for name in self.wanted if name in available}

    def _lacking(self, sample: Sample, name: str) -> DataError:
        columns = ", ".join(sorted(sample.columns)) or "none"
        if name == "reference":
            fix = "map the role reference (or response) when the data is converted"
            return DataError(f"sample {sample.name} has no reference", who=self.who, fix=fix)
        what = f"sample {sample.name} has no column {name!r}; its columns: {columns}"
        fix = f"rename the parameter, give it a default, or add {name!r} to the data"
        return DataError(what, who=self.who, fix=fix)


def bind(function: Callable[..., Any], who: str) -> Binding:
    """Read a function's signature. Raises UserError where no sample could satisfy it."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):  # written in C, without a signature
        raise _unusable(who, "its signature cannot be read") from None
    named = [p for p in parameters if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)]
    wanted = tuple(parameter.name for parameter in named)
    required = tuple(parameter.name for parameter in named if parameter.default is Parameter.empty)
    for parameter in parameters:
        if parameter.kind is Parameter.POSITIONAL_ONLY and parameter.default is Parameter.empty:
            raise _unusable(who, f"{parameter.name!r} takes no name, and arguments are given by name")
    if BATCH in wanted:
        others = [name for name in required if name != BATCH]
        if others:
            raise _unusable(who, f"beside samples it requires {', '.join(others)}")
        return Binding(_by_keyword(function), who, batch=True, asynchronous=_is_async(function))
    every = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
    if "response" not in wanted and not every:
        raise _unusable(who, f"({', '.join(wanted)}) takes no response, which it should judge")
    return Binding(function, who, False, wanted, required, every, _is_async(function))


def _is_async(function: Callable[..., Any]) -> bool:
    calls = (function, getattr(function, "func", None), getattr(function, "__call__", None))  # noqa: B004
    return any(map(inspect.iscoroutinefunction, calls))


def _by_keyword(function: Callable[..., Any]) -> Callable[[Sequence[Sample]], Any]:
    return lambda samples: function(samples=samples)


def _unusable(who: str, what: str) -> UserError:
    return UserError(what, who=who, fix=f"let it take {SIGNATURES}")


def _timed(function: Callable[[Sample], Any], sample: Sample) -> Any:
    began = time.perf_counter()
    try:
        with clock.one_sample():
            result = function(sample)
    except Exception as error:
        error.add_note(f"{_place(error)}, while scoring sample {sample.name}")
        raise
    if inspect.isawaitable(result):
        return _timed_later(result, sample)
    _note(sample, began)
    return result


async def _timed_later(result: Awaitable[Any], sample: Sample) -> Any:
    began = time.perf_counter()
    try:
        return await result
    except SystemExit as error:  # which would end the event loop with all its tasks
        raise RuntimeError(f"sample {sample.name}: SystemExit: {error}") from error
    except Exception as error:
        error.add_note(f"{_place(error)}, while scoring sample {sample.name}")
        raise
    finally:
        _note(sample, began)


async def _placed(answers: Awaitable[Sequence[Score]]) -> Sequence[Score]:
    try:
        return await answers
    except Exception as error:
        error.add_note(_place(error))
        raise


def _place(error: Exception) -> str:
    """File, line and function of the user's code in which it was raised, or that called what raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not _is_ours(frame.filename)]
    users = [frame for frame in theirs if "site-packages" not in frame.filename] or theirs or list(frames)
    frame = users[-1]
    return f"at {frame.filename}:{frame.lineno} in {frame.name}"


def _is_ours(filename: str) -> bool:
    return filename.startswith((_PACKAGE, _LIBRARY, "<frozen"))


def _note(sample: Sample, began: float) -> None:
    clock.note(sample.id, time.perf_counter() - began)


def _settled(results: list[Any]) -> Answers:
    """The results, or one awaitable that runs those of async functions side by side."""
    if not any(inspect.isawaitable(result) for result in results):
        return results

    async def gather() -> list[Score]:
        waiting = [result if inspect.isawaitable(result) else _ready(result) for result in results]
        return list(await asyncio.gather(*waiting))

    return gather()


async def _ready(result: Any) -> Any:
    return result
