"""Answers in words: numbers that are spelled out, and phrases with a meaning of their own."""

from __future__ import annotations

import re
from fractions import Fraction

from posttune_sympy.cleaning import letters
from posttune_sympy.nodes import Node, number, symbol

_UNITS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_ORDINALS = [
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
]
_SMALL = {word: value for value, word in enumerate(_UNITS)} | {
    word: 10 * (place + 2) for place, word in enumerate(_TENS)
}
SCALES = {
    "hundred": 100,
    "thousand": 1_000,
    "million": 1_000_000,
    "billion": 1_000_000_000,
    "trillion": 1_000_000_000_000,
}
_PARTS = {"half": 2, "halves": 2, "quarter": 4, "quarters": 4, "fourth": 4, "fourths": 4} | {
    word + plural: place + 1
    for place, word in enumerate(_ORDINALS)
    if place >= 2 and word != "fourth"
    for plural in ("", "s")
}
_PART = re.compile(
    rf"(?:(?P<whole>.+?)\s+and\s+)?(?:(?P<count>an?|[a-z -]+?)[\s-]+)?(?P<part>{'|'.join(_PARTS)})"
)
_NUMBER = re.compile(r"(?P<minus>(?:minus|negative)\s+)?(?P<words>[a-z][a-z\s,-]*)")
MOST_WORDS = 12
_NO_UNITS = frozenset(["a", "an", "the", "of", "and", "or", "more", "less", "to", "by"])

_MONTHS = [
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
]
_MONTH = rf"(?P<month>{'|'.join(rf'{name[:3]}(?:{name[3:]})?' for name in _MONTHS)}|sept)\.?"
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_DATES = (
    re.compile(rf"{_MONTH}\s+{_DAY}(?:\s*,?\s+(?P<year>\d{{4}}))?"),
    re.compile(rf"(?:the\s+)?{_DAY}\s+(?:of\s+)?{_MONTH}(?:\s*,?\s+(?P<year>\d{{4}}))?"),
    re.compile(r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)"),
)

_NO_SOLUTION = [
    "nosolution",
    "nosolutions",
    "norealsolution",
    "norealsolutions",
    "nosolutionexists",
    "nosolutionsexist",
]
_ALL_REALS = [
    "allrealnumbers",
    "allreals",
    "allrealnumbersx",
    "anyrealnumber",
    "everyrealnumber",
    "thesetofallrealnumbers",
    "thesetofrealnumbers",
    "setofallrealnumbers",
    "therealnumbers",
]
_INTRODUCTION = re.compile(r"\A(?:there(?:is|are|exists?)|(?:theequation|theinequality|it|this)has)")
PHRASES = (
    dict.fromkeys([*_NO_SOLUTION, "emptyset", "theemptyset"], symbol("emptyset"))
    | dict.fromkeys(_ALL_REALS, symbol("R"))
    | {
        begin + name: symbol(letter)
        for name, letter in (("integers", "Z"), ("naturalnumbers", "N"), ("rationalnumbers", "Q"))
        for begin in ("", "all", "the", "thesetof", "thesetofall", "thesetofthe")
    }
    | dict.fromkeys(["dne", "doesnotexist", "thelimitdoesnotexist", "limitdoesnotexist"], symbol("DNE"))
    | dict.fromkeys(["positiveinfinity", "plusinfinity"], symbol("oo"))
    | dict.fromkeys(["negativeinfinity", "minusinfinity"], Node("neg", (symbol("oo"),)))
    | dict.fromkeys(["infinitelymany", "infinitelymanysolutions"], symbol("infinitely many"))
    | {"noon": Node("time", (12 * 3600,)), "midnight": Node("time", (0,))}
)
"""What a phrase means, by its letters."""


def spoken(words: str) -> Node | None:
    """The value of a text that is nothing but a phrase or a number in words, perhaps with a unit."""
    if not words[:1].isalpha() or len(words) > 120:
        return None
    known = PHRASES.get(_INTRODUCTION.sub("", letters(words)))
    if known is not None:
        return known
    found = words.lower().split()
    if len(found) > MOST_WORDS:
        return None
    for units in range(min(2, len(found) - 1) + 1):
        value = _number(" ".join(found[: len(found) - units]))
        unit = " ".join(found[len(found) - units :])
        if value is not None and unit.partition(" ")[0] not in _NO_UNITS:
            return Node("unit", (number(value), unit)) if units else number(value)
    return None


def date(words: str) -> Node | None:
    """``June 20``, ``20th of June, 2021``, ``2021-06-20``."""
    text = " ".join(words.split()).lower() if len(words) < 60 else ""
    for pattern in _DATES:
        found = pattern.fullmatch(text)
        if found is not None:
            name = found["month"]
            month = int(name) if name.isdigit() else [each[:3] for each in _MONTHS].index(name[:3]) + 1
            return Node("date", (month, int(found["day"]), int(found["year"]) if found["year"] else None))
    return None


def _number(text: str) -> Fraction | None:
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    value = _cardinal(found["words"])
    if value is None:
        value = _fraction(found["words"]) or _ordinal(found["words"])
    return -value if value is not None and found["minus"] else value


def _ordinal(text: str) -> Fraction | None:
    return Fraction(_ORDINALS.index(text) + 1) if text in _ORDINALS else None


def _fraction(text: str) -> Fraction | None:
    """``half``, ``two thirds``, ``a quarter``, ``two and a half``."""
    found = _PART.fullmatch(text)
    if found is None or (found["count"] is None and found["part"] not in ("half", "quarter")):
        return None
    count = Fraction(1) if found["count"] in (None, "a", "an") else _cardinal(found["count"])
    whole = Fraction(0) if found["whole"] is None else _cardinal(found["whole"])
    return None if count is None or whole is None else whole + count / _PARTS[found["part"]]


def _cardinal(text: str) -> Fraction | None:
    """``one hundred and twenty-five``."""
    total, group, last = 0, 0, ""
    words = re.split(r"[\s,-]+", text)
    if words[0] in ("a", "an") and words[1:2] and words[1] in SCALES:
        words = words[1:]
    for word in words:
        if word == "and":
            if last not in SCALES:
                return None
        elif word in _SMALL:
            if last in _UNITS or (last in _TENS and not 0 < _SMALL[word] < 10):
                return None
            group += _SMALL[word]
        elif word in SCALES:
            group = (group or 1) * SCALES[word]
            if word != "hundred":
                total, group = total + group, 0
        else:
            return None
        last = word
    return None if last in ("", "and") else Fraction(total + group)
