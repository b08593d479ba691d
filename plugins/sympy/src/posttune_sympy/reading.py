"""From the text of an answer to its tree; trees are cached."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from posttune_sympy.cleaning import clean, compact, letters
from posttune_sympy.grammar import parse
from posttune_sympy.nodes import Node, Unreadable, substituted, symbol, variables, walk
from posttune_sympy.notations import others
from posttune_sympy.quantities import compound
from posttune_sympy.spoken import date, spoken
from posttune_sympy.words import LETTER_UNITS

CACHED = 4096  # trees, the last ones read
LONGEST_CACHED = 300  # characters of an answer

_TIME = re.compile(
    r"(?P<hour>\d{1,2})(?:\s*:\s*(?P<minute>\d\d)(?:\s*:\s*(?P<second>\d\d))?)?\s*(?P<half>[ap]\.?\s?m\.?)?",
    re.IGNORECASE,
)
_UNTEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf|textrm)\s*\{([^{}]*)\}")
_LOOKS = re.compile(
    r"\\(?:text|mathrm|mbox|textbf|textrm|textit|textsf|mathbf|mathsf|mathit|bm)\s*\{([^{}]*)\}"
)
_LABEL = re.compile(r"\(?([A-J])(?:\)\s*|[.:]\s+)(?=\S)")
_CHOICE = re.compile(r"\(?([A-Z])\)?[.:)]?(?:\s.*)?", re.DOTALL)
_OPTION = re.compile(r"(?:option|choice|answer)\s+(?=\(?[A-Z]\b)", re.IGNORECASE)
_CHOICES = re.compile(r"\(?[A-H]{2,8}\)?")
_RATIO = re.compile(r"(?<=\d)(?:\\[,; ]|\s)*(?:\\text\s*\{\s*to\s*\}|\bto\b)\s*(?=\d)")
_BASED = re.compile(
    r"\(?(?:\\(?:text|mathrm|texttt)\s*\{)?(?P<digits>[0-9A-Z]+)\}?\)?\s*_\s*"
    r"(?:\{\s*)?\(?(?:\\(?:text|mathrm)\s*\{\s*)?(?P<base>\d{1,2}|[a-z]+)\s*\}?\)?\s*\}?"
)
_DECIMAL_COMMA = re.compile(r"(\d),(\d)(?!\d\d(?!\d))")
_IN_BASE = re.compile(r"(?P<digits>\d[\dA-Z]*)\s*,?\s*\(?(?:in\s+)?base[\s-]+(?P<base>\w+)\)?", re.IGNORECASE)
_SPACE = re.compile(r"(?:\s|\\q?quad\b|\\[,;: ])+")
_SPACED = re.compile(r"-?\d+(?:\.\d+)?(?:(?:\s|\\q?quad\b|\\[;: ])+-?\d+(?:\.\d+)?)+")
_INTRODUCTION = re.compile(r"\A\s*(?:(?:it|this|that)\s+is\s+|it['’]s\s+)?(?:(?:an?|the)\s+)?", re.IGNORECASE)
_MORE_CHOICES = re.compile(r"\)?[\s.:]*(?:,|&|and\b|or\b)\s*\(?[A-J]\b")
_LIST_OF_WORDS = re.compile(r"\s*(?:[,;&]|\band\b|\bor\b)\s*")
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
    if time(cleaned) or date(_unwrapped(cleaned)):
        return True
    if tree(cleaned) is not None or _UNTEXT.fullmatch(cleaned) is not None:
        return True
    return next(_others(cleaned, None), None) is not None


def readings(answer: str) -> Iterator[Node]:
    """The trees of an answer: as it is most likely meant, then others that its text allows."""
    cleaned = clean(answer)
    moment = time(cleaned) or date(_unwrapped(cleaned))
    if moment is not None:
        yield moment
        return
    node = tree(cleaned)
    if node is not None:
        yield node
    yield from _others(cleaned, node)
    if re.search(r"\d,\d", cleaned):
        other = tree(cleaned, lists=True)
        if other is not None and other != node:
            yield other
        if len(re.findall(r"\d,\d", cleaned)) == 1 and not re.search(r"[(\[{]", cleaned):
            comma = _DECIMAL_COMMA.sub(r"\1.\2", cleaned)
            yield from _some(tree(comma) if comma != cleaned else None)
    if node is not None:
        yield from _renamed(node)
    unlabelled = _LABEL.sub("", _UNTEXT.sub(r"\1 ", cleaned), count=1) if _labelled(cleaned) else cleaned
    if unlabelled != cleaned:
        yield from _some(tree(clean(unlabelled)))


def _others(cleaned: str, node: Node | None) -> Iterator[Node]:
    """Readings of words and of notations that look like something else."""
    words = _unwrapped(cleaned)
    yield from _some(spoken(words))
    if words[:1].isdigit():
        yield from compound(words)
    yield from others(cleaned, words, tree)
    based = _BASED.fullmatch(cleaned)
    if based and _is_numeral(based["digits"], based["base"]):
        yield Node("base", (based["digits"], based["base"]))
    based = _IN_BASE.fullmatch(words)
    if based:
        yield Node("base", (based["digits"], based["base"].lower()))
    if node is None and _SPACED.fullmatch(cleaned) and _distinct(_SPACE.split(cleaned)):
        yield from _some(tree(_SPACE.sub(", ", cleaned)))
    if node is None and _RATIO.search(cleaned):
        yield from _some(tree(_RATIO.sub(":", cleaned)))
    if _CHOICES.fullmatch(words) and sorted(set(words.strip("()"))) == list(words.strip("()")):
        yield Node("seq", tuple(map(symbol, words.strip("()"))))


def _distinct(items: list[str]) -> bool:
    return len(set(items)) == len(items)


def _is_numeral(digits: str, base: str) -> bool:
    """Whether capital letters are digits: ``A3_{16}``, ``FF_{16}``, but not ``A_{16}``."""
    if digits.isdigit():
        return False
    return any(each.isdigit() for each in digits) or (base == "16" and len(digits) > 1)


def _renamed(node: Node) -> Iterator[Node]:
    """The imaginary unit as I or j, and the constant of integration as c."""
    if symbol("I") in walk(node):
        yield substituted(node, "I", symbol("i"))
    if variables(node) == {"j"} and node != symbol("j"):
        yield substituted(node, "j", symbol("i"))
    if node.head == "add" and symbol("c") in node.args and symbol("C") not in walk(node):
        yield substituted(node, "c", symbol("C"))


def _unwrapped(cleaned: str) -> str:
    return _UNTEXT.sub(r" \1 ", cleaned).strip(" .")


def without_unit(node: Node) -> Node | None:
    """``5 m`` or ``5 m/s`` as 5 and a unit, where the letters might be one; None for all else."""
    if node.head == "unit":
        return without_unit(node.args[0])
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
    if node.head == "mul":
        return all(map(_unit, node.args))
    return node.head == "sym" and node.args[0] in LETTER_UNITS


def _some(node: Node | None) -> Iterator[Node]:
    if node is not None:
        yield node


_TEXT_WORD = re.compile(r"\A[\w\s,;&'’.-]*[^\W\d_]{3}[\w\s,;&'’.-]*\Z")


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
    text = re.sub(r"\\[,;:! ]|~", " ", _LOOKS.sub(r"\1", clean(answer))).strip()
    text = _OPTION.sub("", text, count=1)
    found = None if _MORE_CHOICES.match(text.lstrip("(")[1:]) else _CHOICE.fullmatch(text)
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
    if words is not None and words == prose(answer):
        return True
    texts = [_unwrapped(clean(each)) for each in (gold, answer)]
    if not all(len(text) < LONGEST_CACHED and _TEXT_WORD.search(text) for text in texts):
        return False
    names = [_words(text) for text in texts]
    return names[0] == names[1]


def _words(text: str) -> list[str]:
    """The items of a list of words, in any order; a plural without its s."""
    text = _INTRODUCTION.sub("", text, count=1)
    items = (re.sub(r"\s+", " ", item).strip(" .").casefold() for item in _LIST_OF_WORDS.split(text))
    return sorted(item.removesuffix("s") if len(item) > 4 else item for item in items if item)
