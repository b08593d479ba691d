"""``gsm8k``: grade-school problems with worked solutions (Cobbe et al. 2021, arXiv:2110.14168)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from posttune.config.models import Strict
from posttune.data.records import RowError, converted, other_columns, text_of
from posttune.hookspecs import hookimpl
from posttune.types import BadRow, Record, Roles, SourceRow

if TYPE_CHECKING:
    import pyarrow as pa

    from posttune.data.columns import Converted

_ANNOTATION = re.compile(r"<<[^<>\n]*>>")
MARK = "####"


class GSM8KConverter:
    """``question`` and ``answer``, the answer ending with ``#### N``.

    The reference is N without its thousands separators. The response is the worked solution with the
    line ``#### N``, but without the calculator annotations ``<<48/2=24>>``, which are no text that a
    model should write (``annotations: true`` keeps them).
    """

    class Config(Strict):
        """Options of the converter."""

        annotations: bool = Field(False, description="Keep the calculator annotations <<...>>.")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def data_converter_roles(self) -> Roles:
        return Roles(required=("prompt", "response"))

    @hookimpl
    def data_converter_convert(
        self, rows: Iterable[SourceRow], columns: Mapping[str, str]
    ) -> Iterator[Record | BadRow]:
        return converted(rows, lambda row: self._record(row, columns))

    def convert_columns(self, texts: Mapping[str, pa.StringArray], columns: Mapping[str, str]) -> Converted:
        """The same for plain blocks; see `posttune.data.columns`."""
        import pyarrow.compute as pc

        from posttune.data.columns import Converted, check_blank, strings

        prompts, solutions = texts[columns["prompt"]], texts[columns["response"]]
        for column in (prompts, solutions):
            check_blank(column)
        reference = _final_answers(solutions)
        if reference is None:
            reference = strings([final_answer(solution) for solution in solutions.to_pylist()])
        if not self.config.annotations:
            solutions = pc.replace_substring_regex(solutions, _ANNOTATION.pattern, "")
        return Converted({"prompt": prompts, "response": solutions}, reference)

    def _record(self, row: SourceRow, columns: Mapping[str, str]) -> Record:
        solution = text_of(row, "response", columns["response"])
        return Record(
            location=row.location,
            prompt=text_of(row, "prompt", columns["prompt"]),
            response=solution if self.config.annotations else _ANNOTATION.sub("", solution),
            reference=final_answer(solution),
            columns=other_columns(row, columns),
        )


def _final_answers(solutions: pa.StringArray) -> pa.StringArray | None:
    """`final_answer` of each; None where one is none, or has anything but plain ASCII."""
    import numpy as np
    import pyarrow.compute as pc

    from posttune.data.columns import cut_out, parts

    ends, letters = parts(solutions)
    signs = np.flatnonzero(letters == ord("#"))
    last = signs[np.searchsorted(signs, ends[1:]) - 1] if len(signs) else signs
    starts = last - (len(MARK) - 1)  # of the mark, where its last four signs stand together
    if len(last) < len(solutions) or (starts < ends[:-1]).any():
        return None
    if any((letters[starts + place] != ord("#")).any() for place in range(len(MARK))):
        return None
    tails = cut_out(solutions, last + 1)
    _, found = parts(tails)
    if len(found) and not ord(" ") <= found.min() <= found.max() < 0x7F:
        return None
    answers = pc.ascii_trim_whitespace(pc.replace_substring(tails, ",", ""))
    return None if (pc.binary_length(answers).to_numpy(False) == 0).any() else answers


def final_answer(solution: str) -> str:
    """What follows the last ``####``, without thousands separators. Raises `RowError` without one."""
    at = solution.rfind(MARK)
    answer = solution[at + len(MARK) :].strip().replace(",", "")
    if at < 0 or not answer:
        raise RowError(f"the answer has no {MARK!r} line with a final answer")
    return answer
