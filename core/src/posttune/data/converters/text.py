"""``text``: whole texts, all of which is trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from posttune.data.records import converted, other_columns, text_of
from posttune.hookspecs import hookimpl
from posttune.types import BadRow, Record, Roles, SourceRow

if TYPE_CHECKING:
    import pyarrow as pa

    from posttune.data.columns import Converted


class TextConverter:
    """Rows with a ``text``, for continued pre-training. There is no prompt; every token is learnt."""

    @hookimpl
    def data_converter_roles(self) -> Roles:
        return Roles(required=("text",), columns={"text": ("text", "content")})

    @hookimpl
    def data_converter_convert(
        self, rows: Iterable[SourceRow], columns: Mapping[str, str]
    ) -> Iterator[Record | BadRow]:
        return converted(rows, lambda row: _record(row, columns))

    def convert_columns(self, texts: Mapping[str, pa.StringArray], columns: Mapping[str, str]) -> Converted:
        """The same for plain blocks; see `posttune.data.columns`."""
        from posttune.data.columns import Converted, check_blank

        roles = {role: texts[columns[role]] for role in ("text",) if role in columns}
        for column in roles.values():
            check_blank(column)
        return Converted(roles)


def _record(row: SourceRow, columns: Mapping[str, str]) -> Record:
    return Record(
        location=row.location,
        text=text_of(row, "text", columns["text"]),
        columns=other_columns(row, columns),
    )
