"""Numerals: thousands, decimals, exponents, mixed numbers, recurring decimals."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from posttune_sympy.lexing import Token
from posttune_sympy.nodes import Node, Unreadable, number

MAX_EXPONENT = 400  # of 1e400
_LISTS = frozenset({"(", "[", r"\{"})


def commas(found: list[Token], lists: bool) -> list[Token]:
    """Decide what a comma between digits means: ``1,234`` is a number, in brackets or lists two."""
    if not any(token.kind == "num" and "," in token.value for token in found):
        return found
    settled: list[Token] = []
    depth = 0
    for token in found:
        depth += (token.kind == "open" and token.value in _LISTS) - (token.kind == "close" and depth > 0)
        if token.kind != "num" or "," not in token.value:
            settled.append(token)
        elif (lists or depth) and not re.search(r",0", token.value):
            for part in token.value.split(","):
                settled += [Token("num", part, token.gap), Token("sep", ",")]
            settled.pop()
        else:
            settled.append(token._replace(value=token.value.replace(",", "")))
    return settled


def numeral(text: str) -> Node:
    """``12``, ``12.50``, ``.5``, ``1.5e3``."""
    mantissa, _, exponent = text.lower().partition("e")
    whole, _, decimals = mantissa.partition(".")
    power = int(exponent or 0)
    if abs(power) > MAX_EXPONENT:
        raise Unreadable("an exponent too large")
    value = Fraction(int((whole + decimals) or 0), 10 ** len(decimals))
    return number(value * Fraction(10) ** power, max(len(decimals) - power, 0))


def recurring(start: str, period: str) -> Node:
    r"""``0.1\overline{6}``."""
    if not period.isdecimal() or "." not in start:
        raise Unreadable("an overline over no digits")
    whole, _, decimals = start.partition(".")
    fixed = int((whole + decimals) or 0)
    scale = 10 ** len(decimals)
    return number(Fraction(fixed, scale) + Fraction(int(period), scale * (10 ** len(period) - 1)))


def mixed(whole: Node, found: Sequence[Token], position: int) -> tuple[Node, int] | None:
    r"""``2\frac{3}{4}`` and ``2 3/4``: the number, and where it ends. None for a product."""
    value, places = whole.args
    if places or value.denominator != 1:
        return None
    ahead = [token.value for token in found[position : position + 7]]
    if ahead[:1] == ["frac"]:
        part, length = _fraction(ahead[1:])
        length += 1
    elif len(ahead) >= 3 and ahead[1] == "/" and ahead[0].isdecimal() and ahead[2].isdecimal():
        part, length = (ahead[0], ahead[2]), 3
        if not found[position].gap:
            return None
    else:
        return None
    numerator, denominator = (int(digits) if digits.isdecimal() else 0 for digits in part)
    if not 0 < numerator < denominator:
        return None
    return number(value + Fraction(numerator, denominator)), position + length


def _fraction(ahead: Sequence[str]) -> tuple[tuple[str, str], int]:
    r"""Numerator and denominator behind ``\frac`` where both are digits, and the tokens they take."""
    found: list[str] = []
    used = 0
    for _ in range(2):
        if used < len(ahead) and ahead[used] == "{":
            if used + 2 >= len(ahead) or ahead[used + 2] != "}":
                return ("", ""), 0
            found.append(ahead[used + 1])
            used += 3
        elif used < len(ahead):
            digits = ahead[used]
            if len(digits) == 2 and not found:  # \frac12
                return (digits[0], digits[1]), used + 1
            found.append(digits)
            used += 1
    return (found[0], found[1]) if len(found) == 2 else ("", ""), used
