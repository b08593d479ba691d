"""Brackets that are written in another way: the other way round, or around everything."""

from __future__ import annotations

from posttune_sympy.lexing import Token
from posttune_sympy.precedence import SETS

END = Token("end", "")


def turned(found: list[Token]) -> list[Token]:
    """``]0, 1[`` as ``(0, 1)``: a bracket that opens where one should close, and the other way round."""
    if not any(token.value in ("[", "]") for token in found):
        return found
    result: list[Token] = []
    opened: list[str] = []
    for index, token in enumerate(found):
        before = result[-1] if result else END
        operand = before.kind in ("end", "op", "sep", "open")
        after = found[index + 1] if index + 1 < len(found) else END
        if token.value == "]" and operand and "[" not in opened:
            token = Token("open", "(", token.gap)
        elif token.value == "[" and opened and opened[-1] in "([" and not operand and _ends(after):
            token = Token("close", ")", token.gap)
        if token.kind == "open":
            opened.append(token.value)
        elif token.kind == "close" and opened:
            opened.pop()
        result.append(token)
    return result


def _ends(after: Token) -> bool:
    return after.kind in ("end", "sep", "close") or after.value in SETS


def unwrapped(found: list[Token]) -> list[Token]:
    """Tokens without brackets around all of them, however many there are."""
    partner: dict[int, int] = {}
    opened: list[int] = []
    for index, token in enumerate(found):
        if token.kind == "open":
            opened.append(index)
        elif token.kind == "close" and opened:
            partner[opened.pop()] = index
    low, high = 0, len(found) - 1
    while high - low > 1 and partner.get(low) == high and partner.get(low + 1) == high - 1:
        if (found[low].value, found[high].value) not in (("(", ")"), ("{", "}")):
            break
        low, high = low + 1, high - 1
    return found[low : high + 1]
