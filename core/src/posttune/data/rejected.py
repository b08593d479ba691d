"""Rows that cannot be used: refused with their places named, or left out and listed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from posttune.data.layout import REJECTED
from posttune.errors import DataError
from posttune.types import BadRow

OnBadRow = Literal["refuse", "skip"]

NAMED = 10  # bad rows that a refusal names


class Rejected:
    """Bad rows under a policy. With ``refuse`` enough of them end the conversion at once."""

    def __init__(self, policy: OnBadRow) -> None:
        self._policy = policy
        self._rows: list[BadRow] = []

    @property
    def count(self) -> int:
        return len(self._rows)

    def add(self, row: BadRow) -> None:
        """Put a row aside. Raises `DataError` once a refusal has enough rows to name."""
        self._rows.append(row)
        if self._policy == "refuse" and len(self._rows) >= NAMED:
            self._refuse()

    def extend(self, rows: Iterable[BadRow]) -> None:
        """Put rows aside, as ``add`` does."""
        for row in rows:
            self.add(row)

    def check(self, files: Sequence[Path], rows_in: int, rows_out: int) -> None:
        """Raise `DataError` where nothing may be written: no rows, none left, or bad ones refused."""
        if not rows_in:
            raise DataError("no rows", who=", ".join(map(str, files)), fix="check the source")
        reasons = {row.reason for row in self._rows}
        if not rows_out and len(reasons) == 1:
            what = f"every row is bad ({rows_in} in all): {reasons.pop()}"
            raise DataError(what, who=_place(self._rows[0]), fix=_advice(what))
        if self._rows and (self._policy == "refuse" or not rows_out):
            self._refuse()

    def entries(self) -> list[dict[str, Any]]:
        """File, row and reason of each, in the order of the source."""
        return [
            {"file": row.location.file, "row": row.location.row, "reason": row.reason}
            for row in self._sorted()
        ]

    def write(self, folder: Path) -> None:
        """Leave the list in a dataset folder, one JSON object a line. No rows, no file."""
        if self._rows:
            lines = [json.dumps(entry, ensure_ascii=False) + "\n" for entry in self.entries()]
            (folder / REJECTED).write_text("".join(lines), "utf-8")

    def _sorted(self) -> list[BadRow]:
        return sorted(self._rows, key=lambda row: (row.location.file, row.location.row))

    def _refuse(self) -> NoReturn:
        lines = "".join(f"\n  {_place(row)}: {row.reason}" for row in self._sorted()[:NAMED])
        if self._policy == "skip":
            what = f"no row is left: all {self.count} are bad, such as{lines}"
            raise DataError(what, fix="check the columns and the converter")
        many = (
            f"{NAMED} rows or more"
            if self.count >= NAMED
            else "a row"
            if self.count == 1
            else f"{self.count} rows"
        )
        fix = "mend them, or leave them out: --on-bad-row skip (in a configuration, on_bad_row: skip)"
        raise DataError(f"{many} cannot be used:{lines}", fix=fix)


def read_rejected(folder: Path) -> list[dict[str, Any]]:
    """The list that a dataset folder holds."""
    path = folder / REJECTED
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]


def _advice(what: str) -> str:
    if "JSON syntax" in what or "invalid UTF-8" in what:
        return "check what the file holds: JSON lines, a JSON array or CSV, in UTF-8"
    return "check the columns and the converter"


def _place(row: BadRow) -> str:
    return f"{row.location.file}:{row.location.row}"
