"""From the text of an answer to tokens, in one pass from left to right."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from posttune_sympy.nodes import Unreadable
from posttune_sympy.words import (
    BIG,
    BRACKETS,
    FUNCTION_ALIASES,
    FUNCTIONS,
    IGNORED,
    OPERATORS,
    PERCENT,
    SEPARATORS,
    SHORT_UNITS,
    SHORT_WORDS,
    SYMBOLS,
    TEXT_COMMANDS,
)

MAX_TOKENS = 5000
MAX_DIGITS = 1000  # of one numeral


class Token(NamedTuple):
    """Kinds: num, sym, fn, op, sep, open, close, text, cmd. ``gap``: a space stood before it."""

    kind: str
    value: str
    gap: bool = False


_GROUPING = r"(?:\s?\{\s?,\s?\}\s?|,\\!\s*|,\\,|\\,|,|\\!\s*|\\\s)"
_TOKEN = re.compile(
    rf"""
      (?P<space>(?:\s|~|\\[,;:!>\s]|\\$)+)
    | (?P<grouped>\d{{1,3}}(?:(?:\.\d{{3}}){{2,}}|(?:'\d{{3}})+|(?:_\d{{3}})+)(?![\d.'_]))
    | (?P<num>\d{{1,3}}(?:{_GROUPING}\d{{3}})+(?!\d|{_GROUPING}?\d)(?:\.\d+)?
        | \d{{1,2}}(?:,\d\d)+,\d{{3}}(?![\d,])(?:\.\d+)?
        | \d{{1,3}}(?:\ \d{{3}})+(?![\d\ ]*\d|\s*/)
        | (?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{{1,4}}(?![\dA-Za-z]))?)
    | (?P<text>\\(?:{"|".join(sorted(TEXT_COMMANDS, key=len, reverse=True))})\s*\{{(?P<content>[^{{}}]*)\}})
    | (?P<end>\\(?:begin|end)\s*\{{(?P<environment>[A-Za-z]+\*?)\}})
    | \\(?P<cmd>[A-Za-z]+)\*?
    | (?P<row>\\\\(?:\[[^\]]*\])?)
    | (?P<brace>\\[{{}}])
    | (?P<percent>\\?%)
    | (?P<currency>\\?\$|[€£¥₹])
    | (?P<op>\*\*|!=|<=|>=|=<|=>|==|[-+*/^_=<>:!|'&])
    | (?P<sep>[,;])
    | (?P<open>[(\[{{])
    | (?P<close>[)\]}}])
    | (?P<word>[^\W\d_]+)
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_OPERATORS = {"**": "^", "=<": "<=", "=>": ">=", "==": "=", "\\{": "\\{"}
_NUMERIC = re.compile(r"[-+]?\$?\.?\d")
_ORDINALS = frozenset({"st", "nd", "rd", "th"})
_CONDITION = re.compile(r"\s*(?:if|for|when|where|since|because|as|with|such that)\b")


def tokens(text: str, depth: int = 0) -> list[Token]:
    """The tokens of a cleaned answer. Raises Unreadable over the limits and for foreign characters."""
    found: list[Token] = []
    gap = False
    for match in _TOKEN.finditer(text):
        if match.lastgroup == "space":
            gap = True
            continue
        for token in _tokens(match, depth):
            found.append(token._replace(gap=gap))
            gap = False
        if len(found) > MAX_TOKENS:
            raise Unreadable("too many tokens")
    return found


def _tokens(match: re.Match[str], depth: int) -> Iterator[Token]:
    value = match[0]
    if match["grouped"] is not None:
        yield Token("num", re.sub(r"\D", "", value))
    elif match["num"] is not None:
        yield _numeral(value)
    elif match["word"] is not None:
        yield from word(value)
    elif match["content"] is not None:
        yield from _text(match["content"], depth)
    elif match["environment"] is not None:
        yield Token(
            "cmd", f"{'begin' if value.startswith(chr(92) + 'begin') else 'end'}:{match['environment']}"
        )
    elif match["cmd"] is not None:
        yield from _command(match["cmd"])
    elif match["brace"] is not None:
        yield Token("open" if value == r"\{" else "close", value)
    elif match["row"] is not None:
        yield Token("op", "row")
    elif match["percent"] is not None:
        yield Token("op", "%")
    elif match["currency"] is not None:
        yield Token("text", "$")
    elif match["other"] is not None:
        if value not in '."`?' and not value.isspace():
            raise Unreadable("a foreign character")
        if value == "?":
            yield Token("text", "?")
    else:
        kind = match.lastgroup or "op"
        yield Token(kind, _OPERATORS.get(value, value))


def _numeral(value: str) -> Token:
    plain = re.sub(r"[^\d.eE+-]", "", value)
    if len(plain) > MAX_DIGITS:
        raise Unreadable("too many digits")
    # A comma between digits may part a list: the raw text is kept for the other reading.
    return Token("num", value if "," in value and "\\" not in value and "{" not in value else plain)


def _command(name: str) -> Iterator[Token]:
    if name in IGNORED:
        return
    if name in BRACKETS:
        yield Token(*BRACKETS[name])
    elif name in OPERATORS:
        value = OPERATORS[name]
        yield Token("sep", ",") if value == "," else Token("op", value)
    elif name in SYMBOLS:
        yield Token("sym", SYMBOLS[name])
    elif name in FUNCTIONS or name in FUNCTION_ALIASES:
        known = FUNCTION_ALIASES.get(name, name)
        yield Token("cmd" if known in ("sqrt", "binom") else "fn", known)
    elif name in BIG:
        yield Token("cmd", name)
    elif name in ("frac", "dfrac", "tfrac", "cfrac", "nicefrac", "sfrac"):
        yield Token("cmd", "frac")
    elif name in ("binom", "dbinom", "tbinom"):
        yield Token("cmd", "binom")
    elif name in ("pmod", "angle", "triangle", "overline", "dot"):
        yield Token("cmd", "overline" if name == "dot" else name)
    else:
        yield Token("sym", name)


def word(run: str) -> Iterator[Token]:
    """A run of letters: a function, a connective, a unit, a product of variables, or prose."""
    lower = run.lower()
    if lower in SEPARATORS and len(run) > 1:
        yield Token("sep", ",")
    elif lower in PERCENT:
        yield Token("op", "%")
    elif lower in FUNCTIONS or lower in FUNCTION_ALIASES:
        yield Token("fn", FUNCTION_ALIASES.get(lower, lower))
    elif lower in ("pi", "infinity", "inf", "oo"):
        yield Token("sym", "pi" if lower == "pi" else "oo")
    elif lower == "mod":
        yield Token("op", "mod")
    elif lower in SHORT_UNITS or lower in SHORT_WORDS or lower in _ORDINALS:
        yield Token("text", lower)
    elif len(run) <= 3 and run.isascii():
        yield from (Token("sym", letter) for letter in run)
    elif run.isupper() and run.isascii() and len(run) <= 8:
        yield Token("sym", run)
    else:
        yield from _glued(run)


def _glued(run: str) -> Iterator[Token]:
    """``sinx`` is a function of x; anything else is a word."""
    for name in ("arcsin", "arccos", "arctan", "sin", "cos", "tan", "log", "ln"):
        rest = run.removeprefix(name)
        if rest != run and len(rest) == 1:
            yield Token("fn", name)
            yield Token("sym", rest)
            return
    yield Token("text", run.lower())


def _text(content: str, depth: int) -> Iterator[Token]:
    r"""The inside of ``\text{...}``."""
    stripped = content.strip(" \t\n.,;:~\\$")
    lower = stripped.lower()
    if not stripped:
        if "," in content:
            yield Token("sep", ",")
    elif lower in SEPARATORS:
        yield Token("sep", ",")
    elif lower in PERCENT:
        yield Token("op", "%")
    elif lower in ("mod", "π"):
        yield Token("op", "mod") if lower == "mod" else Token("sym", "pi")
    elif len(stripped) == 1 and stripped.isalpha() and not content.startswith((" ", "~")):
        yield Token("sym", stripped)
    elif lower in FUNCTIONS:
        yield Token("fn", lower)
    elif _NUMERIC.match(stripped) and depth == 0:
        yield from tokens(stripped, depth + 1)
    else:
        yield Token("text", "if" if _CONDITION.match(lower) else lower)
