"""``messages``: conversations, in OpenAI's or ShareGPT's style."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pydantic import Field

from posttune.config.models import Strict
from posttune.data.conversation import last_text, parse_messages
from posttune.data.records import RowError, converted, other_columns, reference_of, value_of
from posttune.hookspecs import hookimpl
from posttune.types import BadRow, Record, Roles, SourceRow


class MessagesConverter:
    """Conversations that end with an assistant's turn. All assistant turns are trained.

    Text parts of one message are joined by a line feed; tool calls are kept; a part that is no text
    makes a bad row. A message with ``weight`` or ``loss_weight`` 0 is not trained. A column ``tools``
    is given to the chat template.
    """

    class Config(Strict):
        """Options of the converter."""

        allow_prompt_only: bool = Field(
            False, description="Accept conversations that end before an answer, for reinforcement learning."
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def data_converter_roles(self) -> Roles:
        return Roles(required=("messages",), optional=("reference",))

    @hookimpl
    def data_converter_convert(
        self, rows: Iterable[SourceRow], columns: Mapping[str, str]
    ) -> Iterator[Record | BadRow]:
        return converted(rows, lambda row: self.record(row, columns))

    def record(self, row: SourceRow, columns: Mapping[str, str]) -> Record:
        """The record of a row. Raises `RowError`."""
        messages = parse_messages(value_of(row, "messages", columns["messages"]))
        answered = messages[-1]["role"] == "assistant"
        if not answered and not self.config.allow_prompt_only:
            raise RowError(f"no final assistant turn (the last one is the {messages[-1]['role']}'s)")
        if answered and not messages[-1].get("tool_calls") and not messages[-1]["content"].strip():
            raise RowError("blank final assistant turn")
        return Record(
            location=row.location,
            prompt=last_text(messages, "user"),
            response=messages[-1]["content"] if answered else None,
            messages=messages,
            reference=reference_of(row, columns.get("reference")),
            columns=other_columns(row, columns),
        )
