"""Converters, exporters and observers through their facades."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from posttune import hookimpl
from posttune.errors import DataError, PluginCallError, PluginContractError, PluginReturnError
from posttune.facade import Converter, Exporter, Observers
from posttune.pipeline import bind
from posttune.types import (
    BadRow,
    ExportReport,
    Location,
    Outcome,
    Record,
    Roles,
    RunInfo,
    SourceRow,
    Verification,
)

# --- converters ------------------------------------------------------------------------------


def rows(count: int = 3) -> Iterator[SourceRow]:
    return (SourceRow(Location("f.jsonl", i), {"text": str(i)}) for i in range(1, count + 1))


class Converts:
    """Converts by a function of all rows."""

    def __init__(self, function: Any, roles: Any = None) -> None:
        self.function = function
        self.roles = roles or Roles(required=("text",))

    @hookimpl
    def data_converter_roles(self) -> Any:
        return self.roles

    @hookimpl
    def data_converter_convert(self, rows: Iterable[SourceRow]) -> Any:
        return self.function(rows)


def convert(function: Any, source: Iterable[SourceRow] | None = None) -> list[Record | BadRow]:
    facade = Converter(bind("data_converter", Converts(function), "test"))
    return list(facade.convert(rows() if source is None else source, {"text": "text"}))


def record(row: SourceRow) -> Record:
    return Record(row.location, text=row.data["text"])


def test_records_and_bad_rows_pass_also_several_of_one_row_or_in_chunks() -> None:
    assert [each.location.row for each in convert(lambda rows: map(record, rows))] == [1, 2, 3]
    bad = convert(lambda rows: (BadRow(row.location, "no") for row in rows))
    assert [type(each) for each in bad] == [BadRow] * 3
    twice = convert(lambda rows: (each for row in rows for each in (record(row), record(row))))
    assert [each.location.row for each in twice] == [1, 1, 2, 2, 3, 3]
    chunked = convert(lambda rows: [record(row) for row in reversed(list(rows))])
    assert [each.location.row for each in chunked] == [3, 2, 1]


def test_rows_flow_one_by_one() -> None:
    read: list[int] = []

    def source() -> Iterator[SourceRow]:
        for row in rows():
            read.append(row.location.row)
            yield row

    facade = Converter(bind("data_converter", Converts(lambda rows: map(record, rows)), "test"))
    stream = facade.convert(source(), {})
    next(stream)
    assert read == [1]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda rows: None, "NoneType None, not an iterator of records"),
        (lambda rows: "text", "str 'text', not an iterator"),
        (lambda rows: ({"text": 1} for _ in rows), "dict {'text': 1}, neither Record nor BadRow"),
        (lambda rows: (record(r) for r in rows if r.location.row != 2), "nothing for f.jsonl:2"),
        (lambda rows: (Record(Location("g", 9)) for _ in rows), "a record of g:9, which it was not given"),
        (lambda rows: [record(next(iter(rows)))], "before it had read all rows"),
    ],
)
def test_rows_cannot_vanish_or_appear(function: Any, words: str) -> None:
    with pytest.raises(PluginReturnError) as caught:
        convert(function)
    assert str(caught.value).startswith("data_converter 'test': data_converter_convert returned ")
    assert words in str(caught.value)


def test_a_crash_names_the_row() -> None:
    def crash(rows: Iterable[SourceRow]) -> Iterator[Record]:
        for row in rows:
            yield Record(row.location, text=str(6 // (2 - row.location.row)))

    with pytest.raises(PluginCallError, match=r"ZeroDivisionError.*\(at f.jsonl:2\)"):
        convert(crash)


@pytest.mark.parametrize("error", [OSError("disk gone"), DataError("line 2 is no JSON", who="f.jsonl")])
def test_rows_that_cannot_be_read_are_not_the_converter_s_fault(error: Exception) -> None:
    def source() -> Iterator[SourceRow]:
        yield from rows(1)
        raise error

    with pytest.raises(type(error)) as caught:
        convert(lambda rows: map(record, rows), source())
    assert caught.value is error


def test_roles_are_checked() -> None:
    member = bind("data_converter", Converts(list, roles=("text",)), "test")
    with pytest.raises(PluginReturnError, match="not Roles"):
        Converter(member)


# --- exporters -------------------------------------------------------------------------------


class Exports:
    def __init__(self, report: Any, verification: Any = None) -> None:
        self.report = report
        self.verification = verification

    @hookimpl
    def checkpoint_exporter_export(self, destination: Path) -> Any:
        (destination / "model.safetensors").write_bytes(b"x")
        return self.report

    @hookimpl
    def checkpoint_exporter_verify(self, source: object, destination: Path) -> Any:
        return self.verification


def exporter(report: Any, verification: Any = None) -> Exporter:
    return Exporter(bind("checkpoint_exporter", Exports(report, verification), "test"))


def test_what_an_exporter_reports_must_be_there(tmp_path: Path) -> None:
    good = ExportReport(("model.safetensors",), 10, "float32")
    assert exporter(good).export(object(), tmp_path) == good  # type: ignore[arg-type]
    for report, words in (
        (None, "not ExportReport"),
        (ExportReport(("config.json",), 10, "float32"), "the file 'config.json', which is not in"),
        (ExportReport((), 10, "float32"), "returned no file"),
        (ExportReport(("model.safetensors",), 0, "float32"), "a count of 0 parameters"),
    ):
        with pytest.raises(PluginReturnError, match=words):
            exporter(report).export(object(), tmp_path)  # type: ignore[arg-type]


def test_a_verification_is_passed_on_and_nan_has_failed(tmp_path: Path) -> None:
    for difference, passed in ((0.0, True), (1.0, False), (float("nan"), False)):
        facade = exporter(None, Verification(difference, tolerance=1e-3))
        assert facade.verify(object(), tmp_path).passed is passed  # type: ignore[arg-type]
    with pytest.raises(PluginReturnError, match="bool True, not Verification"):
        exporter(None, True).verify(object(), tmp_path)  # type: ignore[arg-type]


# --- observers -------------------------------------------------------------------------------


class Notes:
    def __init__(self, notes: list[str], name: str, error: BaseException | None = None) -> None:
        self.notes = notes
        self.name = name
        self.error = error

    @hookimpl
    def observer_step(self, stage: str, step: int) -> None:
        self.notes.append(f"{self.name} {stage} {step}")
        if self.error:
            raise self.error

    @hookimpl
    def observer_run_end(self, outcome: Outcome) -> None:
        self.notes.append(f"{self.name} {outcome.status}")


def observers(notes: list[str], *errors: BaseException | None) -> Observers:
    names: Sequence[str] = "abc"
    return Observers(
        [
            bind("observer", Notes(notes, name, error), name)
            for name, error in zip(names, errors, strict=False)
        ]
    )


def test_observers_are_told_in_order_and_only_what_they_hear(tmp_path: Path) -> None:
    notes: list[str] = []
    facade = observers(notes, None, None)
    facade.run_start(RunInfo(tmp_path, "run", "rl", "rl", 2, 0, {}))
    facade.step("rl", 1, {"kl": 0.1})
    facade.checkpoint(tmp_path, 1)
    facade.run_end(Outcome("rl", "finished", 1))
    assert notes == ["a rl 1", "b rl 1", "a finished", "b finished"]
    assert facade.labels == ("a", "b")
    assert facade.wants("observer_step")
    assert not facade.wants("observer_samples")


@pytest.mark.parametrize("error", [RuntimeError("disk full"), SystemExit(1)])
def test_one_that_fails_is_logged_once_and_told_no_more(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    notes: list[str] = []
    facade = observers(notes, error, None)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            facade.step("rl", step, {})
        facade.run_end(Outcome("rl", "failed", 2))
    assert notes == ["a rl 1", "b rl 1", "b rl 2", "b failed"]
    assert list(facade.disabled) == ["a"]
    messages = [each.getMessage() for each in caplog.records]
    assert len(messages) == 1
    assert "observer 'a' is switched off" in messages[0]
    assert type(error).__name__ in messages[0]


def test_an_interrupt_is_no_fault_of_an_observer() -> None:
    with pytest.raises(KeyboardInterrupt):
        observers([], KeyboardInterrupt()).step("rl", 1, {})


def test_an_instance_made_by_hand_is_checked_too() -> None:
    class Deaf:
        pass

    with pytest.raises(PluginContractError, match="observer 'deaf': it has no hook at all"):
        bind("observer", Deaf(), "deaf")
