"""Runs gold cases (frozen inputs and outputs of other libraries) through the algorithms.

A gold file is JSON: ``{"cases": [{"name", "source", "inputs", "outputs", "tol"}]}``. The first part of
a name is the family (``gae``, ``ppo_clip``, ``kl`` ...), the rest of it the variant; the first word of
``source`` is the library, whose defaults and conventions belong to the case. Batches are padded
rectangles with a mask. Outputs per token are compared where the mask is 1, gradients everywhere.
A value passes when it is within ``tol * max(1, |expected|)``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttune.errors import DataError

Nested = Any  # a number, or a list of Nested


@dataclass(frozen=True)
class Case:
    """One case of a gold file."""

    name: str
    source: str
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Nested]
    tol: float


@dataclass(frozen=True)
class Got:
    """What we compute for an output. ``mask``, of the same shape, says what counts; None: all of it."""

    value: Nested
    mask: Nested = None


@dataclass(frozen=True)
class Failure:
    """An output that differs."""

    name: str
    output: str
    expected: Nested
    got: Nested


@dataclass
class GoldReport:
    """How a file did. ``passed`` counts cases all of whose outputs agree."""

    passed: int = 0
    failed: list[Failure] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)  # names: an unknown family, variant or output


def run_gold(path: Path) -> GoldReport:
    """Run every case of a file. Raises DataError where it is no gold file, naming the case."""
    from posttune.selftest._families import compute

    report = GoldReport()
    for case in read_cases(path):
        got = compute(case)
        if got is None or not set(case.outputs) <= set(got):
            report.unsupported.append(case.name)
            continue
        failures = list(_failures(case, got))
        report.failed += failures
        report.passed += not failures
    return report


def read_cases(path: Path) -> list[Case]:
    """The cases of a file, in order. Raises DataError."""
    fix = "give a JSON file of cases as `posttune selftest gold --help` describes"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", who=str(path), fix=fix) from error
    except ValueError as error:
        raise DataError(f"is no JSON: {error}", who=str(path), fix=fix) from error
    cases = document.get("cases") if isinstance(document, dict) else None
    if not isinstance(cases, list) or not cases:
        raise DataError('has no list of "cases"', who=str(path), fix=fix)
    return [_case(number, entry, path) for number, entry in enumerate(cases, start=1)]


_FIELDS = {"name": str, "source": str, "inputs": dict, "outputs": dict}


def _case(number: int, entry: Any, path: Path) -> Case:
    for name, kind in _FIELDS.items():
        if not isinstance(entry, dict) or not isinstance(entry.get(name), kind):
            what = f"case {number} lacks {name!r}, or it is no {kind.__name__}"
            raise DataError(what, who=str(path), fix="correct the case")
    tol = entry.get("tol", 1e-5)
    if isinstance(tol, bool) or not isinstance(tol, int | float) or not tol >= 0:
        raise DataError(
            f"case {number}: tol must be a number from 0 on", who=str(path), fix="correct the case"
        )
    return Case(entry["name"], entry["source"], entry["inputs"], entry["outputs"], float(tol))


def _failures(case: Case, got: Mapping[str, Got]) -> Iterator[Failure]:
    for name, expected in case.outputs.items():
        if not _agree(expected, got[name].value, got[name].mask, case.tol):
            yield Failure(case.name, name, expected, got[name].value)


def _agree(expected: Nested, got: Nested, mask: Nested, tol: float) -> bool:
    if isinstance(expected, Sequence) and isinstance(got, Sequence):
        if len(expected) != len(got):
            return False
        masks = mask if isinstance(mask, Sequence) else [mask] * len(got)
        return all(_agree(*each, tol) for each in zip(expected, got, masks, strict=True))
    if mask is not None and not mask:
        return True
    if not isinstance(expected, int | float) or not isinstance(got, int | float):
        return False
    if math.isnan(expected) or math.isinf(expected):
        return expected == got or (math.isnan(expected) and math.isnan(got))
    return abs(got - expected) <= tol * max(1.0, abs(expected))  # False for NaN
