"""Numbers as people and models write them: signs, currency, percent, separators, decimals, fractions."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from fractions import Fraction

LONGEST = 60  # digits; a longer one is no answer to a word problem, and converting it would take time

_MINUS = ("-", "\u2212", "\u2013")
_SIGN = r"(?P<sign>[-+\u2212\u2013])?"
_CURRENCY = r"(?:(?:\\?\$|€|£)\s?)?"
_DIGITS = r"(?P<whole>\d{1,3}(?:(?:,|\{,\}|\\,)\d{3})+(?!\d)|\d+)?(?:\.(?P<decimals>\d+))?"
_DENOMINATOR = r"(?:\s?/\s?(?P<denominator>\d+)(?!\d))?"
_NUMBER = re.compile(
    rf"(?<![\w.]){_SIGN}{_CURRENCY}(?P<inner>[-\u2212\u2013])?(?=\.?\d){_DIGITS}{_DENOMINATOR}"
)
_SEPARATORS = str.maketrans("", "", ",{}\\")


def numbers(text: str) -> Iterator[Fraction]:
    """Every number in ``text``, in order, exact. Time is linear in its length."""
    for match in _NUMBER.finditer(text):
        value = _value(match)
        if value is not None:
            yield value


def number(text: str) -> Fraction | None:
    """The number that ``text`` is about: the first one after its last equals sign."""
    return next(numbers(text.rpartition("=")[2]), None)


def last_number(text: str) -> Fraction | None:
    """The last number in ``text``."""
    return next(iter(deque(numbers(text), maxlen=1)), None)


def _value(match: re.Match[str]) -> Fraction | None:
    whole = (match["whole"] or "").translate(_SEPARATORS)
    decimals = match["decimals"] or ""
    denominator = match["denominator"] or ""
    if not whole + decimals or len(whole) + len(decimals) + len(denominator) > LONGEST:
        return None
    if denominator and not int(denominator):
        return None
    value = Fraction(int(whole + decimals or "0"), 10 ** len(decimals)) / int(denominator or 1)
    minuses = (match["sign"] in _MINUS) + (match["inner"] in _MINUS)
    return -value if minuses == 1 else value
