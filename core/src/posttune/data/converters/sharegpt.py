"""``sharegpt``: conversations written with ``from`` and ``value``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from posttune.data.conversation import Message
from posttune.data.converters.messages import MessagesConverter
from posttune.data.converters.preference import PreferenceConverter
from posttune.data.records import as_text, converted
from posttune.hookspecs import hookimpl
from posttune.types import BadRow, Record, Roles, SourceRow

SYSTEM = "system"  # a column with the system's message


class ShareGPTConverter:
    """``conversations`` of ``{"from": "human", "value": ...}``, perhaps with a column ``system``.

    Turns are read as the converter ``messages`` reads them. With the columns ``chosen`` and ``rejected``
    they are the context of preference data. A text in ``system`` becomes the first message, unless the
    conversation begins with one of its own.
    """

    class Config(MessagesConverter.Config):
        """Options of the converter."""

    def __init__(self, config: Config) -> None:
        self._whole = MessagesConverter(config)
        self._pairs = PreferenceConverter()

    @hookimpl
    def data_converter_roles(self) -> Roles:
        return Roles(
            required=("messages",),
            optional=("chosen", "rejected", "reference"),
            columns={"messages": ("conversations", "conversation", "messages", "items")},
        )

    @hookimpl
    def data_converter_convert(
        self, rows: Iterable[SourceRow], columns: Mapping[str, str]
    ) -> Iterator[Record | BadRow]:
        paired = "chosen" in columns and "rejected" in columns
        convert = self._pairs.record if paired else self._whole.record
        return converted(rows, lambda row: _with_system(convert(row, columns)))


def _with_system(record: Record) -> Record:
    system = record.columns.get(SYSTEM)
    if not isinstance(system, str) or not system.strip() or not record.messages:
        return record
    others = {name: value for name, value in record.columns.items() if name != SYSTEM}
    if record.messages[0]["role"] == SYSTEM:
        return record
    first: Message = {"role": SYSTEM, "content": as_text(system, SYSTEM)}
    return replace(record, messages=(first, *record.messages), columns=others)
