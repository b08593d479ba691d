r"""The reward `gsm8k`: 1 where the answer of a word problem equals the reference, else 0.

Accepted forms; of several marked answers the last one that holds a number counts (of the last 100
marks of each form). The text is read whole, however long:

    form                                    example                          value
    hashes, to the end of the line          #### 1,234                       1234
    box                                     \boxed{-5}, \fbox{x = 18}        -5, 18
    phrase, to the end of the sentence      The answer is $1,234.50.         1234.5
                                            **Answer:** 3 * 6 = 18           18
    last number (``mode: flexible`` only)   so she has 8 eggs left           8

A number may carry a sign (-, +, the minus U+2212), a currency ($, also ``\$`` and ``$-5``, euro,
pound), a percent sign, thousands separators (``1,234`` ``1{,}234`` ``1\,234``), decimals
(``18.00`` is 18, ``.5``), a denominator (``1/2``, ``\frac{1}{2}``), markdown around it and a unit
behind it. It is compared exactly. More than 60 digits are no number.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal

from pydantic import Field

from posttune.config.models import Strict
from posttune.errors import DataError
from posttune.hookspecs import hookimpl
from posttune.reward.base import BaseRewardFunction
from posttune.reward.numbers import last_number, number
from posttune.types import Needs

Mode = Literal["strict", "flexible"]

SPAN = 200  # characters that a marked answer may take
PLACES = 100  # marks of each form that are looked at, the last ones
_HASHES = re.compile(r"####")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_PHRASE = re.compile(r"\banswer\b[*_\s]*(?:is\b|:|=)", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|\.(?=\s|$)")
_FRACTION = re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_BEFORE_LETTERS = re.compile(r"[^A-Za-z]*")


class GSM8KConfig(Strict):
    """Which answers count."""

    mode: Mode = Field("strict", description="strict: a marked answer; flexible: else the last number.")


class GSM8KReward(BaseRewardFunction):
    """1.0 where the response's final number equals the reference's, else 0.0.

    The reference is a number, or a whole GSM8K answer that ends in ``#### 72``; of a list, any one will do.
    """

    Config = GSM8KConfig

    def compute_reward(
        self,
        prompt: str,  # noqa: ARG002
        response: str,
        reference: str | list[str] | None = None,
        **_columns: Any,
    ) -> float:
        """Raises DataError for a missing reference and for one without a number."""
        references = [reference] if isinstance(reference, str) else list(reference or ())
        wanted = [reference_number(each) for each in references]
        if not wanted:
            raise DataError(
                "a sample has no reference", who="reward 'gsm8k'", fix="map the role reference (or response)"
            )
        found = extract_answer(response, self.config.mode)
        return float(found is not None and found in wanted)

    @hookimpl
    def reward_needs(self) -> Needs:
        """A reference."""
        return Needs(reference=True)


def extract_answer(text: str, mode: Mode = "strict") -> Fraction | None:
    """The final number of an answer; None where there is none."""
    forms = ((_HASHES, _after_hashes), (_BOX, _in_box), (_PHRASE, _after_phrase))
    marked = [found for mark, read in forms if (found := _last(text, mark, read))]
    if marked:
        return max(marked, key=lambda found: found[0])[1]
    return last_number(text) if mode == "flexible" else None


def reference_number(reference: str) -> Fraction:
    """The number of a reference: a marked one, else the first. Raises DataError."""
    marked = extract_answer(reference)
    found = number(reference) if marked is None else marked
    if found is None:
        shown = reference if len(reference) <= 60 else reference[:57] + "..."
        raise DataError(
            f"the reference {shown!r} holds no number",
            who="reward 'gsm8k'",
            fix="map the role reference to a number, or to an answer that ends in #### and a number",
        )
    return found


Reader = Callable[[str], Fraction | None]


def _last(text: str, mark: re.Pattern[str], read: Reader) -> tuple[int, Fraction] | None:
    """Where the last mark stands that has a number behind it, and the number."""
    for match in reversed(deque(mark.finditer(text), maxlen=PLACES)):
        value = read(text[match.end() : match.end() + SPAN])
        if value is not None:
            return match.start(), value
    return None


def _after_hashes(text: str) -> Fraction | None:
    return _leading(text.partition("\n")[0])


def _in_box(text: str) -> Fraction | None:
    return _stated(_braced(text))


def _after_phrase(text: str) -> Fraction | None:
    return _stated(_SENTENCE_END.split(text, maxsplit=1)[0])


def _braced(text: str) -> str:
    """What stands between the first brace and its partner, or the first word."""
    if not text.startswith("{"):
        return text.split(maxsplit=1)[0] if text.strip() else ""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:position]
    return text[1:]


def _stated(text: str) -> Fraction | None:
    """``3 * 6 = 18 eggs`` states 18, ``18 because 2 * 9 = 18`` the first 18, ``x = 18`` 18."""
    leading = _leading(text)
    return number(_plain(text)) if leading is None else leading


def _leading(text: str) -> Fraction | None:
    """The number of the part before any letter."""
    found = _BEFORE_LETTERS.match(_plain(text))
    return number(found[0]) if found else None


def _plain(text: str) -> str:
    return _FRACTION.sub(r"\1/\2", text)
