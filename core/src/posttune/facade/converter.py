"""The data converter: every row comes back as a record or as a bad row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from posttune.errors import PosttuneError
from posttune.facade.values import shown
from posttune.pipeline import Member
from posttune.types import BadRow, Location, Record, Roles, SourceRow

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
            raise self._member.wrong(HOOK, f"nothing for {_place(next(iter(feed.waiting)))}")
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
        if result.location not in feed.seen_now and result.location not in feed.waiting:
            raise self._member.wrong(HOOK, f"a record of {_place(result.location)}, which it was not given")
        feed.answered(result.location)


class _Feed:
    """Hands rows out, and knows which of them wait for an answer."""

    def __init__(self, rows: Iterable[SourceRow]) -> None:
        self._rows = iter(rows)
        self.waiting: dict[Location, None] = {}
        self.seen_now: set[Location] = set()  # answered since the last row was handed out
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
            self.last = row.location
            self.waiting[row.location] = None
            self.seen_now.clear()
            yield row
        self.exhausted = True

    def answered(self, location: Location) -> None:
        self.waiting.pop(location, None)
        self.seen_now.add(location)


def _place(location: Location) -> str:
    return f"{location.file}:{location.row}"
