"""The data converter: every row comes back as a record or as a bad row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from posttune.errors import PosttuneError
from posttune.facade.values import shown
from posttune.pipeline import Member
from posttune.types import BadRow, Location, Record, Roles, SourceRow

if TYPE_CHECKING:
    from posttune.data.columns import ConvertColumns

HOOK = "data_converter_convert"


class Converter:
    """A data converter. ``roles`` says what it reads."""

    def __init__(self, member: Member) -> None:
        self._member = member
        roles = member.call("data_converter_roles")
        if not isinstance(roles, Roles):
            raise member.wrong("data_converter_roles", f"{shown(roles)}, not Roles")
        self.roles = roles

    @property
    def name(self) -> str:
        """The converter's name."""
        return self._member.id.name

    @property
    def convert_columns(self) -> ConvertColumns | None:
        """The converter's way by columns, where it has one and is our own."""
        (plugin,) = self._member.manager.get_plugins()
        own = self._member.id.distribution == "posttune"
        return getattr(plugin, "convert_columns", None) if own else None

    def convert(self, rows: Iterable[SourceRow], columns: Mapping[str, str]) -> Iterator[Record | BadRow]:
        """At least one record or bad row per row, with the row's location. ``columns``: role to path."""
        feed = _Feed(rows)
        results = self._member.call(HOOK, rows=feed, columns=columns)
        if results is None or isinstance(results, str | Mapping) or not isinstance(results, Iterable):
            raise self._member.wrong(HOOK, f"{shown(results)}, not an iterator of records")
        for result in self._guarded(iter(results), feed):
            self._check(result, feed)
            yield result
        if feed.waiting:
            raise self._member.wrong(HOOK, f"nothing for {_place(feed.waiting[0])}")
        if not feed.exhausted:
            raise self._member.wrong(HOOK, "before it had read all rows")

    def _guarded(self, results: Iterator[Record | BadRow], feed: _Feed) -> Iterator[Record | BadRow]:
        while True:
            try:
                result = next(results)
            except StopIteration:
                return
            except (KeyboardInterrupt, PosttuneError):
                raise
            except BaseException as error:
                if feed.failed:
                    raise  # the rows could not be read: not the plugin's fault
                about = f" (at {_place(feed.last)})" if feed.last else ""
                raise self._member.failed(HOOK, error, about) from error
            yield result

    def _check(self, result: object, feed: _Feed) -> None:
        if not isinstance(result, Record | BadRow):
            raise self._member.wrong(HOOK, f"{shown(result)}, neither Record nor BadRow")
        if not feed.answer(result.location):
            raise self._member.wrong(HOOK, f"a record of {_place(result.location)}, which it was not given")


class _Feed:
    """Hands rows out, and knows which of them wait for an answer.

    Most converters answer the last row before they take the next, so that one is told from the rest
    without a look into a table.
    """

    def __init__(self, rows: Iterable[SourceRow]) -> None:
        self._rows = iter(rows)
        self._earlier: dict[Location, None] = {}  # handed out before the last row, not answered
        self._seen_now: set[Location] = set()  # of those, answered since the last row was handed out
        self._last_waits = False
        self.last: Location | None = None
        self.exhausted = False
        self.failed = False

    def __iter__(self) -> Iterator[SourceRow]:
        while True:
            self.failed = True
            row = next(self._rows, None)
            self.failed = False
            if row is None:
                break
            if self._last_waits and self.last is not None:
                self._earlier[self.last] = None
            if self._seen_now:
                self._seen_now.clear()
            self.last, self._last_waits = row.location, True
            yield row
        self.exhausted = True

    @property
    def waiting(self) -> list[Location]:
        """The rows without an answer, in order."""
        last = [self.last] if self._last_waits and self.last is not None else []
        return [*self._earlier, *last]

    def answer(self, location: Location) -> bool:
        """Take an answer for a row; False where it was not handed out, or answered long ago."""
        if location is self.last or location == self.last:
            self._last_waits = False
            return True
        if location in self._earlier:
            del self._earlier[location]
            self._seen_now.add(location)
            return True
        return location in self._seen_now


def _place(location: Location) -> str:
    return f"{location.file}:{location.row}"
