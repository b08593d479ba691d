"""Notations that the grammar of formulas reads as something else, or not at all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fractions import Fraction

from posttune_sympy.literals import recurring
from posttune_sympy.nodes import Node, number, product, symbol, variables

_RECURRING = re.compile(r"(-?)(\d+\.\d*)\((\d+)\)")
_ANGLE = re.compile(
    r"(?P<degrees>\d{1,3})\s*\^\s*\{?\s*\\circ\s*\}?\s*(?P<minutes>\d{1,2})\s*(?:'|\^\s*\{?\s*\\prime\s*\}?)\s*"
    r"(?:(?P<seconds>\d{1,2}(?:\.\d+)?)\s*(?:''|\"|\^\s*\{\s*\\prime\s*\\prime\s*\}))?"
)
_CHOSEN = re.compile(
    r"(?:\{\s*\}\s*)?[_^]?\s*\{?\s*(\d+)\s*\}?\s*(?:C|\\(?:text|mathrm)\s*\{\s*C\s*\})\s*_\s*\{?\s*(\d+)\s*\}?"
    r"|n?C\s*\(\s*(\d+)\s*,\s*(\d+)\s*\)"
)
_SHARE = re.compile(r"(\d+)\s+(?:out\s+of|in)\s+(\d+)")
_MIXED = re.compile(r"(\d+)\s+and\s+(\d+)\s*/\s*(\d+)")
_LETTERS = re.compile(r"(?<![A-Za-z\\])([a-z])([a-z])(?=\s*\^|\s*\Z)")
_BASIS = re.compile(r"\\(?:mathbf|boldsymbol|bm|hat|widehat|vec)\s*\{?\s*\\?([ijk])(?:math)?\b")
_AXES = tuple(map(symbol, "ijk"))


def others(cleaned: str, words: str, tree: Callable[[str], Node | None]) -> Iterator[Node]:
    r"""``0.1(6)``, ``22^\circ 30'``, ``{}_5C_2``, ``1 out of 6``, ``1 and 1/2``, ``\pi hr^2``, vectors."""
    if found := _RECURRING.fullmatch(cleaned):
        value = recurring(found[2], found[3])
        yield Node("neg", (value,)) if found[1] else value
    if found := _ANGLE.fullmatch(cleaned):
        yield Node("deg", (number(_degrees(found)),))
    if found := _CHOSEN.fullmatch(cleaned):
        n, k = (each for each in found.groups() if each is not None)
        yield Node("binom", (number(int(n)), number(int(k))))
    if (found := _SHARE.fullmatch(words)) and int(found[2]):
        yield number(Fraction(int(found[1]), int(found[2])))
    if (found := _MIXED.fullmatch(words)) and int(found[2]) < int(found[3]):
        yield number(int(found[1]) + Fraction(int(found[2]), int(found[3])))
    if (r"\pi" in cleaned or "_" in cleaned) and "\\text" not in cleaned and _LETTERS.search(cleaned):
        spread = tree(_LETTERS.sub(r"\1 \2", cleaned))
        if spread is not None:
            yield spread
    if _BASIS.search(cleaned) and (node := tree(cleaned)) is not None:
        yield from _vectors(node)


def _degrees(found: re.Match[str]) -> Fraction:
    parts = (found["degrees"], found["minutes"], found["seconds"] or 0)
    return sum((Fraction(part) / 60**place for place, part in enumerate(parts)), Fraction(0))


def _vectors(node: Node) -> Iterator[Node]:
    """A sum of multiples of i, j and k as its coordinates: three, and two where there is no k."""
    places: list[Node] = [number(0)] * 3
    for term in node.args if node.head == "add" else (node,):
        negative = term.head == "neg"
        inner = term.args[0] if negative else term
        factors = list(inner.args) if inner.head == "mul" else [inner]
        axes = [factor for factor in factors if factor in _AXES]
        if len(axes) != 1:
            return
        factors.remove(axes[0])
        size = number(1)
        for factor in factors:
            size = product(size, factor)
        if variables(size) & {"i", "j", "k"} or places[_AXES.index(axes[0])] != number(0):
            return
        places[_AXES.index(axes[0])] = Node("neg", (size,)) if negative else size
    yield Node("group", ("(", ")", *places))
    if places[2] == number(0):
        yield Node("group", ("(", ")", *places[:2]))
