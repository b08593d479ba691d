"""``prompt_response``: a prompt, the answer to it, and perhaps a reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from posttune.data.conversation import is_conversation, last_text, parse_messages
from posttune.data.records import converted, lookup, other_columns, reference_of, text_of
from posttune.hookspecs import hookimpl
from posttune.types import BadRow, Record, Roles, SourceRow

if TYPE_CHECKING:
    import pyarrow as pa

    from posttune.data.columns import Converted


class PromptResponseConverter:
    """Rows with a prompt and a response. Without a response the rows serve reinforcement learning only.

    A prompt may be a list of messages; the response then becomes their last turn.
    """

    @hookimpl
    def data_converter_roles(self) -> Roles:
        return Roles(required=("prompt",), optional=("response", "reference"))

    @hookimpl
    def data_converter_convert(
        self, rows: Iterable[SourceRow], columns: Mapping[str, str]
    ) -> Iterator[Record | BadRow]:
        return converted(rows, lambda row: _record(row, columns))

    def convert_columns(self, texts: Mapping[str, pa.StringArray], columns: Mapping[str, str]) -> Converted:
        """The same for plain blocks; see `posttune.data.columns`."""
        from posttune.data.columns import Converted, check_blank

        roles = {role: texts[columns[role]] for role in ("prompt", "response") if role in columns}
        for column in roles.values():
            check_blank(column)
        reference = texts[columns["reference"]] if "reference" in columns else None
        return Converted(roles, reference)


def _record(row: SourceRow, columns: Mapping[str, str]) -> Record:
    response = text_of(row, "response", columns["response"]) if "response" in columns else None
    messages = None
    value = lookup(row.data, columns["prompt"])
    if is_conversation(value):
        messages = parse_messages(value, "prompt")
        prompt = last_text(messages, "user")
        if response is not None:
            messages = (*messages, {"role": "assistant", "content": response})
    else:
        prompt = text_of(row, "prompt", columns["prompt"])
    return Record(
        location=row.location,
        prompt=prompt,
        response=response,
        messages=messages,
        reference=reference_of(row, columns.get("reference")),
        columns=other_columns(row, columns),
    )
