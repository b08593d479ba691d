"""Conformance of a data converter.

class TestMine(DataConverterSuite):
    name = "mine"
    good = ({"question": "1+1", "answer": "2"},)       # rows that it reads
    bad = ({"question": 3}, {})                          # rows that it must refuse, each for itself
    columns = {"prompt": "question"}                    # roles that the user would map

``requires``: ``streaming`` (rows are taken one after the other, never all at once), ``bad`` (rows can be
bad: a format without rules has none).
"""

from __future__ import annotations

import copy
import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from posttune.testing._streams import stdout_of
from posttune.testing.plugin_suite import PluginSuite
from posttune.types import BadRow, Location, Record, SourceRow

HOSTILE: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, "", " ", "\x00", "🙂", "x" * 10_000, [], {}, [None], {"": None}, [[[[]]]],
    {"role": 1}, [{"role": "user"}], [{"role": None, "content": None}], {"a": {"b": {"c": []}}}, float("nan"),
)  # fmt: skip
AHEAD = 1000  # rows that a streaming converter may take before its first answer


class DataConverterSuite(PluginSuite):
    """What every data converter must do."""

    kind: ClassVar[str] = "data_converter"
    requires = frozenset({"streaming", "bad"})
    good: Sequence[Mapping[str, Any]] = ()
    bad: Sequence[Mapping[str, Any]] = ()
    columns: Mapping[str, str] = {}

    def rows(self, data: Sequence[Mapping[str, Any]]) -> list[SourceRow]:
        """Rows of a file, from row 1 on."""
        return [SourceRow(Location("rows.jsonl", line), each) for line, each in enumerate(data, start=1)]

    def converter(self) -> Any:
        """The converter behind the facade, which sees that every row is answered where it stands."""
        from posttune.facade.converter import Converter

        return Converter(self.member())

    def resolved(self) -> Mapping[str, str]:
        """Role to column, as core finds it: what is mapped, then the usual names."""
        from posttune.data.roles import canonical, resolve

        roles = self.converter().roles
        return resolve(self.name, roles, canonical(self.columns), self.rows(self.good), {}, "the suite")

    def convert(self, data: Sequence[Mapping[str, Any]]) -> list[Record | BadRow]:
        """Everything that rows become."""
        return list(self.converter().convert(self.rows(data), self.resolved()))

    def test_the_suite_has_rows(self) -> None:
        """Without rows nothing would be checked."""
        assert self.good, "let the suite say good rows: good = ({...},)"
        assert self.bad or "bad" not in self.requires, "let it say bad rows, or take bad out of requires"

    def test_good_rows_become_records(self) -> None:
        """Every good row at least one, with its location."""
        found = self.convert(self.good)
        refused = [each.reason for each in found if isinstance(each, BadRow)]
        assert not refused, refused
        assert {each.location.row for each in found} == set(range(1, len(self.good) + 1))

    def test_records_have_the_roles_that_it_names(self) -> None:
        """What its roles require is filled; inference rests on it."""
        required = self.converter().roles.required
        for record in self.convert(self.good):
            empty = [role for role in required if getattr(record, role) is None]
            assert not empty, f"no {', '.join(empty)} in the record of row {record.location.row}"

    def test_roles_are_roles(self) -> None:
        """It names roles of a record, and requires at least one."""
        roles = self.converter().roles
        known = set(Record.__dataclass_fields__) - {"location", "columns"}
        assert roles.required
        assert {*roles.required, *roles.optional, *roles.columns} <= known

    def test_bad_rows_are_refused_one_by_one(self) -> None:
        """Each with a reason, none by an exception."""
        for data in self.bad:
            found = self.convert([data])
            assert [type(each) for each in found] == [BadRow], data
            assert all(isinstance(each, BadRow) and each.reason.strip() for each in found)

    def test_a_bad_row_harms_no_other(self) -> None:
        """Good rows around bad ones become what they become alone, where they stand."""
        if not self.bad or not self.good:
            return
        bad = itertools.cycle(self.bad)
        mixed = [row for good in self.good for row in (good, next(bad))]
        found = self.convert(mixed)
        records = [each for each in found if isinstance(each, Record)]
        assert [each.location.row for each in records if each.location.row % 2 == 0] == []
        assert [_bare(each) for each in records] == [_bare(each) for each in self.convert(self.good)]

    def test_order_is_that_of_the_rows(self) -> None:
        """Records come in the order of their rows."""
        places = [each.location.row for each in self.convert([*self.good, *self.good])]
        assert places == sorted(places)

    def test_no_rows(self) -> None:
        """An empty file has no records, and is no error."""
        assert self.convert([]) == []

    def test_anything_may_stand_in_a_row(self) -> None:
        """Whatever a value is, the row becomes a record or a bad row."""
        rows: list[Mapping[str, Any]] = [{}, {"zq": 1}]
        for row in self.good:
            for key in row:
                rows += [{**row, key: value} for value in HOSTILE]
                rows.append({other: value for other, value in row.items() if other != key})
        assert len(self.convert(rows)) >= len(rows)

    def test_it_streams(self) -> None:
        """The first record comes before the last row is read: files are larger than memory."""
        if "streaming" not in self.requires:
            return
        taken, columns = 0, self.resolved()

        def endless() -> Iterator[SourceRow]:
            nonlocal taken
            while True:
                taken += 1
                yield SourceRow(Location("rows.jsonl", taken), self.good[taken % len(self.good)])
                assert taken < 100 * AHEAD, "it reads all rows before it answers"

        found = list(itertools.islice(self.converter().convert(endless(), columns), 10))
        assert len(found) == 10
        assert taken <= AHEAD

    def test_it_repeats_itself(self) -> None:
        """The same rows become the same records, in one instance and in two."""
        converter, columns = self.converter(), self.resolved()
        first, second = (list(converter.convert(self.rows(self.good), columns)) for _ in range(2))
        assert first == second == self.convert(self.good)

    def test_it_leaves_rows_alone(self) -> None:
        """Nothing is written into the rows."""
        rows = copy.deepcopy(list(self.good))
        self.convert(rows)
        assert rows == list(self.good)

    def test_records_can_be_stored(self) -> None:
        """What it makes is written to a dataset and read back as it was."""
        from posttune.config.base import PluginRef
        from posttune.data.conversion import ConvertRequest, convert
        from posttune.data.dataset import SampleDataset

        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "rows.jsonl")
            source.write_text("".join(json.dumps(row) + "\n" for row in self.good), encoding="utf-8")
            ref = PluginRef(name=self.name, options=dict(self.options))
            request = ConvertRequest([source], Path(folder, "data"), ref, map=dict(self.columns))
            report = convert(request)
            dataset = SampleDataset(report.path)
            expected = [each for each in self.convert(self.good) if isinstance(each, Record)]
            assert len(dataset) == len(expected)
            for row, record in zip(dataset, expected, strict=True):
                for role in ("prompt", "response", "text", "chosen", "rejected"):
                    if getattr(record, role) is not None and row.get(role) is not None:
                        assert row[role] == getattr(record, role), role

    def test_converting_prints_nothing(self) -> None:
        """Standard output belongs to the command."""
        with stdout_of() as output:
            self.convert([*self.good, *self.bad])
        assert output.text == ""


def _bare(record: Record | BadRow) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key != "location"}
