"""A gold case, read: its family, variant, library and inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttune.advantage.functions import MaskMode
from posttune.advantage.groups import Singleton
from posttune.errors import DataError
from posttune.loss.kl import Clamp
from posttune.selftest.gold import Case


@dataclass(frozen=True)
class Conventions:
    """What a library does where the inputs of a case are silent."""

    eps: float = 1e-6  # added to the deviation of a group
    singleton: Singleton = "raw"
    mask_mode: MaskMode = "carry"
    ddof: int = 1  # of the whitening
    clamp: Clamp = "verl"  # of the KL terms


VERL = Conventions()
LIBRARIES = {
    "verl": VERL,
    "skyrl": Conventions(mask_mode="plain"),
    "trl": Conventions(eps=1e-4, singleton="zero", mask_mode="plain", clamp="none"),
    "openrlhf": Conventions(eps=1e-9, singleton="zero", mask_mode="zero", ddof=0, clamp="output"),
    "nemo": Conventions(singleton="zero", ddof=0),
}


class Inputs:
    """Typed access to a case. Raises DataError that names the case and the input."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.raw: Mapping[str, Any] = case.inputs
        self.family, *rest = case.name.split("/")
        self.words = [part for part in rest if "=" not in part]
        self.pairs = dict(part.split("=", 1) for part in rest if "=" in part)
        library = case.source.replace(".", " ").replace("-", " ").split(" ")[0].lower()
        self.conventions = LIBRARIES.get(library, VERL)

    def __contains__(self, name: str) -> bool:
        return self.raw.get(name) is not None

    def word(self, place: int, default: str = "") -> str:
        """A plain word of the name, after the family."""
        return self.words[place] if place < len(self.words) else default

    def fault(self, what: str) -> DataError:
        """An error about the case."""
        return DataError(what, who=f"case {self.case.name!r}", fix="correct the case")

    def tensor(self, name: str, value: Any = None) -> Tensor:
        """A rectangle of numbers as float64; null is NaN."""
        given = self.raw.get(name) if value is None else value
        if given is None:
            raise self.fault(f"lacks the input {name!r}")
        try:
            return torch.tensor(_nan_for_null(given), dtype=torch.float64)
        except (TypeError, ValueError) as error:
            raise self.fault(f"input {name!r} is no rectangle of numbers: {error}") from error

    def number(self, *names: str, default: float | None = None) -> float:
        """The first of the names that is given, or the default."""
        for name in names:
            given = self.raw.get(name)
            if isinstance(given, int | float):
                return float(given)
            if given is not None:
                raise self.fault(f"input {name!r} must be a number")
        if default is None:
            raise self.fault(f"lacks the input {names[0]!r}")
        return default

    def optional(self, name: str) -> float | None:
        """A number that may be absent."""
        return self.number(name) if name in self else None

    def flag(self, *names: str) -> bool:
        """True unless an input, or a ``key=False`` of the name, says otherwise."""
        given = [self.raw.get(name, self.pairs.get(name)) for name in names]
        return next((str(value) == "True" for value in given if value is not None), True)

    def named(self, name: str) -> dict[str, Any]:
        """A mapping; a list is one by position."""
        given = self.raw.get(name, {})
        if not isinstance(given, dict | list):
            raise self.fault(f"input {name!r} must be a mapping or a list")
        return given if isinstance(given, dict) else {str(place): each for place, each in enumerate(given)}

    def groups(self, rows: int) -> tuple[Any, ...]:
        """The group of each row: listed in ``group``, or consecutive ones of ``group_size``."""
        if "group_size" in self:
            size = max(int(self.number("group_size")), 1)
            return tuple(row // size for row in range(rows))
        given = self.raw.get("group", list(range(rows)))
        if not isinstance(given, list) or len(given) != rows:
            raise self.fault(f"input 'group' must list the group of each of the {rows} rows")
        return tuple(tuple(key) if isinstance(key, list) else key for key in given)


def _nan_for_null(value: Any) -> Any:
    if isinstance(value, list):
        return [_nan_for_null(item) for item in value]
    return float("nan") if value is None else value
