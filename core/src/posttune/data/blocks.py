"""A stretch of a source file: what is read in one place and may be parsed in another process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from posttune.types import BadRow, Location, SourceRow

BLOCK_BYTES = 1 << 20
BLOCK_ROWS = 1000


class Block(Protocol):
    """Rows of a file that follow one another. It can be pickled; where it ends depends on the file alone."""

    def rows(self, warnings: Counter[str]) -> Iterator[SourceRow | BadRow]:
        """Every row with its location, bad ones among them. What deserves a warning is counted."""
        ...


@dataclass(frozen=True)
class ValueBlock:
    """Values that were parsed already, one a row; ``first`` is the number of the first.

    A text in the place of an object is the reason why there is none.
    """

    file: str
    first: int
    values: list[dict[str, Any] | str]

    def rows(self, warnings: Counter[str]) -> Iterator[SourceRow | BadRow]:  # noqa: ARG002
        """Every row."""
        for number, value in enumerate(self.values, start=self.first):
            location = Location(self.file, number)
            yield BadRow(location, value) if isinstance(value, str) else SourceRow(location, value)


class ValueBlocks:
    """Gathers values into blocks."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._next = 1
        self._values: list[dict[str, Any] | str] = []
        self._weight = 0

    def add(self, value: dict[str, Any] | str, weight: int) -> Iterator[ValueBlock]:
        """Take the next row, about ``weight`` bytes of it; yields a block once it is full."""
        self._values.append(value)
        self._weight += weight
        if len(self._values) >= BLOCK_ROWS or self._weight >= BLOCK_BYTES:
            yield from self.rest()

    def rest(self) -> Iterator[ValueBlock]:
        """Yield what is left."""
        if self._values:
            yield ValueBlock(self._file, self._next, self._values)
            self._next += len(self._values)
            self._values, self._weight = [], 0
