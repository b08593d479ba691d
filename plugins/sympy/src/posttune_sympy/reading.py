"""From the text of an answer to its tree; trees are cached."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from posttune_sympy.cleaning import clean, compact, letters
from posttune_sympy.grammar import parse
from posttune_sympy.nodes import Node, Unreadable, symbol, variables, walk
from posttune_sympy.sets import substituted
from posttune_sympy.words import LETTER_UNITS

CACHED = 4096  # trees, the last ones read
LONGEST_CACHED = 300  # characters of an answer

_TIME = re.compile(
    r"(?P<hour>\d{1,2})(?:\s*:\s*(?P<minute>\d\d)(?:\s*:\s*(?P<second>\d\d))?)?\s*(?P<half>[ap]\.?\s?m\.?)?",
    re.IGNORECASE,
)
_UNTEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf|textrm)\s*\{([^{}]*)\}")
_LABEL = re.compile(r"\(?([A-J])(?:\)\s*|[.:]\s+)(?=\S)")
_CHOICE = re.compile(r"\(?([A-Z])\)?[.:)]?(?:\s.*)?", re.DOTALL)
_PROSE = re.compile(r"[\w\s.,;:()\"“”'’-]+")


@lru_cache(maxsize=CACHED)
def _cached(text: str, lists: bool) -> Node | None:
    return _tree(text, lists)


def _tree(text: str, lists: bool) -> Node | None:
    try:
        return parse(text, lists=lists)
    except Unreadable:
        return None


def tree(cleaned: str, lists: bool = False) -> Node | None:
    """The tree of a cleaned answer; None where it is not in the grammar."""
    return _cached(cleaned, lists) if len(cleaned) <= LONGEST_CACHED else _tree(cleaned, lists)


def readable(answer: str) -> bool:
    r"""Whether it is an answer: in the grammar, or one ``\text{...}``."""
    cleaned = clean(answer)
    if not cleaned:
        return False
    return time(cleaned) is not None or tree(cleaned) is not None or _UNTEXT.fullmatch(cleaned) is not None


def readings(answer: str) -> Iterator[Node]:
    """The trees of an answer: as it is most likely meant, then others that its text allows."""
    cleaned = clean(answer)
    moment = time(cleaned)
    if moment is not None:
        yield moment
        return
    node = tree(cleaned)
    if node is not None:
        yield node
    if re.search(r"\d,\d", cleaned):
        other = tree(cleaned, lists=True)
        if other is not None and other != node:
            yield other
        if len(re.findall(r"\d,\d", cleaned)) == 1 and not re.search(r"[(\[{]", cleaned):
            yield from _some(tree(re.sub(r"(\d),(\d)", r"\1.\2", cleaned)))
    if node is not None and symbol("I") in walk(node):
        yield substituted(node, "I", symbol("i"))
    unlabelled = _LABEL.sub("", _UNTEXT.sub(r"\1 ", cleaned), count=1) if _labelled(cleaned) else cleaned
    if unlabelled != cleaned:
        yield from _some(tree(clean(unlabelled)))


def without_unit(node: Node) -> Node | None:
    """``5 m`` or ``5 m/s`` as 5 and a unit, where the letters might be one; None for all else."""
    if node.head != "mul":
        return None
    numbers = tuple(factor for factor in node.args if not variables(factor))
    letters = [factor for factor in node.args if variables(factor)]
    if not numbers or not letters or not all(map(_unit, letters)):
        return None
    names = "".join(each.args[0] for factor in letters for each in walk(factor) if each.head == "sym")
    return Node("unit", (Node("mul", numbers), names))


def _unit(node: Node) -> bool:
    if node.head in ("inv", "pow"):
        return _unit(node.args[0])
    return node.head == "sym" and node.args[0] in LETTER_UNITS


def _some(node: Node | None) -> Iterator[Node]:
    if node is not None:
        yield node


def _labelled(cleaned: str) -> bool:
    return _LABEL.match(_UNTEXT.sub(r"\1 ", cleaned).lstrip()) is not None


def time(cleaned: str) -> Node | None:
    """A time of day with seconds or a half of the day, in seconds; ``4:30`` alone may be a ratio."""
    if len(cleaned) > 60:
        return None
    found = _TIME.fullmatch(_UNTEXT.sub(r" \1", cleaned).replace("~", " ").strip())
    if found is None or not (found["half"] or found["second"]):
        return None
    hour, minute, second = (int(found[name] or 0) for name in ("hour", "minute", "second"))
    if found["half"]:
        hour = hour % 12 + (12 if found["half"].lower().startswith("p") else 0)
    return Node("time", (hour * 3600 + minute * 60 + second,))


def choice_letter(answer: str) -> str | None:
    """The letter of ``C``, ``(C)``, ``\\text{(C)}``, ``(C) Cecile``; None for other answers."""
    text = re.sub(r"\\[,;:! ]|~", " ", _UNTEXT.sub(r"\1", clean(answer))).strip()
    found = _CHOICE.fullmatch(text)
    return found[1] if found and (len(text) <= 3 or text[1] in ").: " or text[0] == "(") else None


def prose(answer: str) -> str | None:
    """The letters of an answer in words; None where it holds mathematics."""
    text = _UNTEXT.sub(r"\1", clean(answer))
    key = letters(text)
    if not key or any(each.isdigit() for each in key) or _PROSE.fullmatch(text) is None:
        return None
    if len(key) == 1:
        return text.strip(" ().")
    return None if len(key) < 4 and re.search(r"[,'’-]", text) else key


def same_text(gold: str, answer: str) -> bool:
    """Whether two answers are the same text, up to spaces and looks."""
    first, second = compact(clean(gold)), compact(clean(answer))
    if first and first == second:
        return True
    words = prose(gold)
    return words is not None and words == prose(answer)
