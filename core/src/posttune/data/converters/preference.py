"""``preference``: a prompt with a better and a worse answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from posttune.data.conversation import Message, is_conversation, last_text, parse_messages
from posttune.data.records import (
    MISSING,
    RowError,
    as_text,
    converted,
    lookup,
    other_columns,
    reference_of,
    text_of,
)
from posttune.hookspecs import hookimpl
from posttune.types import BadRow, Record, Roles, SourceRow

_TURN = "\n\nAssistant:"


class PreferenceConverter:
    """Rows with ``chosen`` and ``rejected``, as text, as a message, or as whole conversations.

    The context is the prompt (text or messages), or the messages that both conversations begin
    with. Without either, ``chosen`` and ``rejected`` are whole transcripts in the style of HH-RLHF, and the
    prompt is what they share up to the last ``Assistant:``.
    """

    @hookimpl
    def data_converter_roles(self) -> Roles:
        return Roles(required=("chosen", "rejected"), optional=("prompt", "messages", "reference"))

    @hookimpl
    def data_converter_convert(
        self, rows: Iterable[SourceRow], columns: Mapping[str, str]
    ) -> Iterator[Record | BadRow]:
        return converted(rows, lambda row: self.record(row, columns))

    def record(self, row: SourceRow, columns: Mapping[str, str]) -> Record:
        """The record of a row. Raises `RowError`."""
        return _record(row, columns)


def _record(row: SourceRow, columns: Mapping[str, str]) -> Record:
    chosen, chosen_context = _answer(row, "chosen", columns["chosen"])
    rejected, rejected_context = _answer(row, "rejected", columns["rejected"])
    if chosen_context != rejected_context:
        raise RowError("chosen and rejected answer different conversations")
    prompt, context = _prompt(row, columns)
    context = chosen_context or context
    if prompt is None and context is None:
        prompt, chosen, rejected = _split_transcripts(chosen, rejected)
    return Record(
        location=row.location,
        prompt=prompt if context is None else last_text(context, "user"),
        chosen=chosen,
        rejected=rejected,
        messages=context,
        reference=reference_of(row, columns.get("reference")),
        columns=other_columns(row, columns),
    )


def _answer(row: SourceRow, role: str, path: str) -> tuple[str, tuple[Message, ...] | None]:
    """The answer's text, and the messages before it where the value is a conversation."""
    value = lookup(row.data, path)
    if not is_conversation(value):
        return text_of(row, role, path), None
    messages = parse_messages(value, role)
    if messages[-1]["role"] != "assistant":
        raise RowError(f"{role} does not end with an assistant turn")
    text = as_text(messages[-1]["content"], role)
    if not text.strip():
        raise RowError(f"blank {role}")
    return text, messages[:-1] or None


def _prompt(row: SourceRow, columns: Mapping[str, str]) -> tuple[str | None, tuple[Message, ...] | None]:
    for role in ("messages", "prompt"):
        value: Any = lookup(row.data, columns[role]) if role in columns else MISSING
        if is_conversation(value):
            return None, parse_messages(value, role)
    return (text_of(row, "prompt", columns["prompt"]), None) if "prompt" in columns else (None, None)


def _split_transcripts(chosen: str, rejected: str) -> tuple[str, str, str]:
    differs = (place for place, pair in enumerate(zip(chosen, rejected, strict=False)) if pair[0] != pair[1])
    shared = chosen[: next(differs, min(len(chosen), len(rejected)))]
    cut = shared.rfind(_TURN)
    if cut < 0:
        raise RowError("no prompt: neither a column for it, nor transcripts with a shared beginning")
    end = cut + len(_TURN)
    answers = chosen[end:], rejected[end:]
    for role, answer in zip(("chosen", "rejected"), answers, strict=True):
        if not answer.strip():
            raise RowError(f"blank {role}")
    return shared[:end], *answers
