r"""``math``: problems whose solutions box the final answer (Hendrycks et al. 2021, arXiv:2103.03874)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from posttune.data.records import RowError, converted, other_columns, reference_of, text_of
from posttune.hookspecs import hookimpl
from posttune.types import BadRow, Record, Roles, SourceRow

_BOX = re.compile(r"\\(?:boxed|fbox)\b\s*")
_BARE = re.compile(r"[^\s$.,;]+")


class MathConverter:
    r"""``problem`` and ``solution``, the final answer in ``\boxed{...}``.

    The reference is the column ``answer`` where there is one, else what the last box of the solution
    holds, as it is written. Without a solution the rows serve reinforcement learning only.
    """

    @hookimpl
    def data_converter_roles(self) -> Roles:
        return Roles(
            required=("prompt",),
            optional=("response", "reference"),
            columns={
                "prompt": ("problem", "question", "prompt"),
                "response": ("solution", "response"),
                "reference": ("answer", "final_answer", "expected_answer", "reference", "ground_truth"),
            },
        )

    @hookimpl
    def data_converter_convert(
        self, rows: Iterable[SourceRow], columns: Mapping[str, str]
    ) -> Iterator[Record | BadRow]:
        return converted(rows, lambda row: _record(row, columns))


def _record(row: SourceRow, columns: Mapping[str, str]) -> Record:
    response = text_of(row, "response", columns["response"]) if "response" in columns else None
    reference = reference_of(row, columns.get("reference"))
    if reference is None:
        if response is None:
            raise RowError("neither a solution nor an answer")
        reference = boxed(response)
    return Record(
        location=row.location,
        prompt=text_of(row, "prompt", columns["prompt"]),
        response=response,
        reference=reference,
        columns=other_columns(row, columns),
    )


def boxed(solution: str) -> str:
    r"""What the last ``\boxed{...}`` holds, braces balanced; ``\boxed 5`` too.

    Raises `RowError` without one.
    """
    for match in reversed(list(_BOX.finditer(solution))):
        answer = _content(solution, match.end())
        if answer:
            return answer
    raise RowError(r"the solution has no \boxed{...} with a final answer")


def _content(text: str, start: int) -> str:
    if text[start : start + 1] != "{":
        bare = _BARE.match(text, start)
        return bare[0] if bare else ""
    depth = 0
    escaped = False
    for place in range(start, len(text)):
        letter = text[place]
        if letter in "{}" and not escaped:
            depth += 1 if letter == "{" else -1
            if depth == 0:
                return text[start + 1 : place].strip()
        escaped = letter == "\\" and not escaped
    return ""  # never closed
