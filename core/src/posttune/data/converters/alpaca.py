"""``alpaca``: an instruction, perhaps an input for it, and the output; Dolly's names too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import Field

from posttune.config.models import Strict
from posttune.data.conversation import Message
from posttune.data.records import MISSING, RowError, as_text, lookup, other_columns, reference_of, text_of
from posttune.hookspecs import hookimpl
from posttune.types import BadRow, Record, Roles, SourceRow

INPUTS = ("input", "context")  # Alpaca's name, Dolly's
INSTANCES = "instances"  # of the seed tasks: a list of inputs with their outputs
HISTORY = "history"  # earlier turns, as pairs
SYSTEM = "system"


class AlpacaConverter:
    """``instruction``, ``input`` and ``output``; or ``instruction``, ``context`` and ``response`` (Dolly).

    The prompt is the instruction, and below it the input where there is one. A row with ``instances``
    (Alpaca's seed tasks) gives a record for each. ``system`` and ``history`` (pairs of question and
    answer) make the record a conversation.
    """

    class Config(Strict):
        """Options of the converter."""

        separator: str = Field("\n\n", description="Between the instruction and its input.")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def data_converter_roles(self) -> Roles:
        return Roles(
            required=("prompt",),
            optional=("response", "reference"),
            columns={"prompt": ("instruction",), "response": ("output", "response")},
        )

    @hookimpl
    def data_converter_convert(
        self, rows: Iterable[SourceRow], columns: Mapping[str, str]
    ) -> Iterator[Record | BadRow]:
        for row in rows:
            try:
                yield from self._records(row, columns)
            except RowError as problem:
                yield BadRow(row.location, str(problem))

    def _records(self, row: SourceRow, columns: Mapping[str, str]) -> list[Record]:
        instances = row.data.get(INSTANCES) if "response" not in columns else None
        if instances is None:
            return [self._record(row, columns, row.data)]
        if not isinstance(instances, list) or not instances:
            raise RowError(f"{INSTANCES} is no list of inputs and outputs")
        if not all(isinstance(instance, Mapping) for instance in instances):
            raise RowError(f"{INSTANCES} holds something that is no object")
        paths = {**columns, "response": "output"}
        return [self._record(row, paths, {**row.data, **instance}) for instance in instances]

    def _record(self, row: SourceRow, columns: Mapping[str, str], data: Mapping[str, Any]) -> Record:
        row = SourceRow(row.location, data)
        prompt, taken = self._prompt(row, columns)
        response = text_of(row, "response", columns["response"]) if "response" in columns else None
        messages = _conversation(row, prompt, response)
        left = other_columns(row, columns)
        for name in (*taken, INSTANCES, *((SYSTEM, HISTORY) if messages else ())):
            left.pop(name, None)
        return Record(
            location=row.location,
            prompt=prompt,
            response=response,
            messages=messages,
            reference=reference_of(row, columns.get("reference")),
            columns=left,
        )

    def _prompt(self, row: SourceRow, columns: Mapping[str, str]) -> tuple[str, list[str]]:
        """The prompt, and the columns that went into it beside the instruction."""
        instruction = text_of(row, "prompt", columns["prompt"])
        taken = [name for name in INPUTS if lookup(row.data, name) is not MISSING]
        values = [row.data[name] for name in taken if row.data[name] is not None]
        texts = [as_text(value, "input") for value in values]
        return self.config.separator.join([instruction, *(text for text in texts if text.strip())]), taken


def _conversation(row: SourceRow, prompt: str, response: str | None) -> tuple[Message, ...] | None:
    """The messages of a row with a system's message or a history; None for any other."""
    system, history = row.data.get(SYSTEM), row.data.get(HISTORY) or []
    if not isinstance(history, list):
        raise RowError(f"{HISTORY} is no list of pairs")
    turns: list[Message] = []
    if isinstance(system, str) and system.strip():
        turns.append({"role": "system", "content": as_text(system, SYSTEM)})
    for pair in history:
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError(f"{HISTORY} holds something that is no pair of question and answer")
        question, answer = (as_text(text, HISTORY) for text in pair)
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if not turns:
        return None
    turns.append({"role": "user", "content": prompt})
    if response is not None:
        turns.append({"role": "assistant", "content": response})
    return tuple(turns)
