"""What a dataset holds, seen before any model is loaded: converted already, or still to be converted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttune.config.models import ConvertStage
from posttune.types import Location

if TYPE_CHECKING:
    from posttune.data.writer import Row

SHOWN = 3
REFERENCE = "reference"


@dataclass
class DataView:
    """Rows, columns, and where values are missing. ``gaps`` holds the first rows of each lacking column."""

    rows: int = 0
    columns: list[str] = field(default_factory=list)
    gaps: dict[str, list[Location]] = field(default_factory=dict)
    lacking: Counter[str] = field(default_factory=Counter)

    def add(self, location: Location, values: Mapping[str, Any], wanted: Collection[str]) -> None:
        """Count one row."""
        self.rows += 1
        for name, value in values.items():
            if value is not None and name not in self.columns:
                self.columns.append(name)
        for name in wanted:
            value = values.get(name)
            if value is None or (name == REFERENCE and value in ("", [])):
                self._gap(name, location)

    def where(self, column: str) -> str:
        """The first rows without a value, for a message."""
        places = self.gaps.get(column, [])
        more = self.lacking[column] - len(places)
        named = ", ".join(f"{place.file}:{place.row}" for place in places)
        return f"{named} and {more} more" if more else named

    def _gap(self, name: str, location: Location) -> None:
        self.lacking[name] += 1
        places = self.gaps.setdefault(name, [])
        if len(places) < SHOWN:
            places.append(location)


def view_dataset(path: Path, wanted: Collection[str], limit: int | None = None) -> DataView:
    """A converted dataset: all of its rows, or the first ``limit``. Raises DataError where it is none."""
    from posttune.data.dataset import SampleDataset

    dataset = SampleDataset(path)
    view = DataView(columns=list(dataset.columns))
    suspects = [name for name in wanted if name in dataset.columns and dataset.missing(name)]
    rows = min(len(dataset), limit or len(dataset))
    if not suspects:
        view.rows = rows
        return view
    for index in range(rows):
        view.add(dataset.location(index), dataset[index], suspects)
    return view


def view_sources(stage: ConvertStage, to: Path, wanted: Collection[str]) -> DataView:
    """What a convert stage would write to ``to``, without tokens. Raises what the conversion would."""
    from posttune.data.conversion import ConvertRequest, preview

    sources = [stage.source] if isinstance(stage.source, str) else stage.source
    request = ConvertRequest(
        sources=sources,
        to=to,
        converter=stage.converter,
        map=stage.map,
        tokenizer=stage.tokenizer,
        template=stage.template,
        on_bad_row=stage.on_bad_row,
        max_length=stage.max_length,
        truncation=stage.truncation,
        overwrite=stage.overwrite,
    )
    view = DataView()
    for row in preview(request):
        view.add(row.record.location, _values(row), wanted)
    return view


def _values(row: Row) -> dict[str, Any]:
    """The columns of a row as a dataset has them: the response is the reference where there is none."""
    from posttune.data.layout import ROLES

    record = row.record
    values = {name: getattr(record, name) for name in ROLES if getattr(record, name) is not None}
    values |= {name: record.columns.get(name, True) for name in row.extra_names}
    if "response" in values:
        values.setdefault(REFERENCE, values["response"])
    return values
