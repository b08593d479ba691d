"""Where the final answer stands in a text. Time is linear in the length of the text.

The table, from the strongest mark to the weakest:

1. a box: ``\\boxed{...}``, ``\\fbox{...}``; the last one that is closed
2. ``#### ...`` to the end of the line; the last one
3. a phrase: "the answer is ...", "Answer: ...", "A: ..."; the last one that an answer follows
4. the last block that begins with "```output", where it holds one answer
5. the whole text, where it is nothing but an answer
6. the last formula between ``$...$``, ``$$...$$``, ``\\(...\\)`` or ``\\[...\\]``, or a number in a later
   sentence; or what the text ends with behind a verb, where it is more than a number
7. the last number; where there is none, the words that a text of one sentence ends with

Before that: what stands before ``</think>`` goes (an open ``<think>`` leaves nothing; other tags of reasoning
alike), of ``<answer>...</answer>`` the inside counts, chat markers end the text and GSM8K's ``<<6*7=42>>``
go.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from posttune_sympy.cleaning import plain, repaired
from posttune_sympy.spoken import spoken
from posttune_sympy.words import ANSWER_PHRASE, FILLERS

PHRASES = 3  # of them are looked at, from the last one
FORMULAS = 4
MAX_WHOLE = 4_000  # characters of an answer without a mark
CLAUSE = 2_000  # characters behind a phrase
SENTENCE = 300

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_BRACES = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*\{|\\.|[{}]", re.DOTALL)
_THOUGHT = re.compile(r"</think(?:ing)?>|<\|end_of_thought\|>|\[/THINK\]|◁/think▷")
_THINKING = re.compile(r"<think(?:ing)?>|<\|begin_of_thought\|>|\[THINK\]|◁think▷")
_CHAT = re.compile(
    r"<\|(?:im_(?:start|end)|endoftext|end_of_text|eot_id|eot|end|user)\|>|</s>|<(?:eos|end_of_turn)>"
)
_CALCULATION = re.compile(r"<<[^<>\n]*>>")
_CODE = re.compile(
    r"""
    ^.*(?:
        \w\(['"] | \w\(\) | \)\.\w+\( | __\w                          # f("x"), f(), (x).f(, __name__
      | \b[A-Za-z_]\w*\.[A-Za-z_]\w*\(                              # os.system(
      | (?<![\w\\])(?:exec|eval|compile|getattr|setattr|open|print|input)\(
      | (?<!\\)\blambda\b[\w\s,]*:
      | \\(?:write|input|include|immediate|open(?:in|out)|read|catcode|directlua|csname)(?![A-Za-z])
      | (?:^|;)\s*(?:from\s+[\w.]+\s+)?import\s+[\w.]+
    ).*$
    """,
    re.MULTILINE | re.VERBOSE,
)
r"""Lines of code: a number in them is no answer."""
_OUTPUT = re.compile(r"^```output[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_COMMANDS = re.compile(r"\\(?:begin|end)\{[A-Za-z*]+\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z']{2,}")
_WORDS = re.compile(r"[^\W\d_]{4}|[^\x00-\x7f\W\d_]|[^\W\d_]{2}[\s,]+[^\W\d_]{2}")
_SENTENCE = re.compile(r"\n|[.!?。！](?=\s|$|\*)|。")
_CUT = re.compile(r",\s|;|:\s|\s\(|\b(?:because|since|as|so|but|which|when|where|if|for|not|non)\b|，")
_DOLLAR = re.compile(r"(?<!\\)\$\$?")
_NUMBER = re.compile(
    r"""
    (?<![A-Za-z0-9_.\\^{])
    (?P<sign>[-+]\s?)?
    (?:\\?\$|[€£¥₹])?\s?
    (?P<body>
        \d{1,3}(?:(?:,|\{,\}|,\\!|\\,)\d{3})+(?![\d]|,\d)(?:\.\d+)?
      | \d+\s\d+/\d+(?!\w)
      | \d+(?:\.\d+)?(?:\s?/\s?\d+(?:\.\d+)?)?(?:[eE][-+]?\d+(?!\w))?
        (?:\s?(?:\\times|\*|x)\s?10\s?\^\s?\{?-?\d+\}?)?
      | \.\d+
    )
    (?P<comma>,\d+(?![,\d]))?
    (?P<percent>\s?(?:\\?%|percent\b|per\scent\b|pct\b))?
    """,
    re.VERBOSE,
)
_SAID = re.compile(
    r"(?:\b(?:is|are|be|at|in|equals|has|have|needs?|gets?|gives|makes?|costs?|takes?|becomes)\b|(?P<equal>=))\s*:?\s*"
)
_YES = re.compile(r"\W*(yes|no|true|false)\b(?=\s*[.,;:!]|\s*\Z)", re.IGNORECASE)
_SHAPED = re.compile(r"[(\[{].*,|\bsqrt\b|[\^√]|\\(?:sqrt|pi)\b|(?<![A-Za-z])pi\b")
r"""What the number in it alone would not tell: a point, a root, a power."""
_CONNECTED = re.compile(
    r"\A(?:at|in|on|to|a|an|the)\s|\b(?:so|thus|hence|therefore|since|because|when|if|for|that|which|then|but)\b"
)
_OPEN_END = ("=", "+", "-", "*", "/", "<", ">", r"\times", r"\cdot")
_DENIED = re.compile(
    r"(?:\bnot|n['’]t|\bnon|不是)(?:\s+be)?\s*\(?[A-J]\b\)?(?:\s*(?:,|or|nor)\s*\(?[A-J]\b\)?)*"
)
_CHOICES = (
    re.compile(r"\A\W*\(?([A-J])(?:[).:,]|\s*\Z|\s+(?:is|because|since)\b)"),
    re.compile(r"\(([A-J])\)"),
    re.compile(r"(?<![\w'’])([B-HJ]|A(?!\s+[a-z]))(?![\w'’])"),
)

Readable = Callable[[str], bool]
"""Whether a text is an answer in the grammar."""


@dataclass(frozen=True)
class Found:
    """Final answers of a text: the last one, all boxes, and the words that the text calls its answer."""

    last: str
    boxes: tuple[str, ...] = ()
    words: str = ""


def final_answer(text: str, form: str, readable: Readable, *, words: bool = True) -> Found | None:
    """The final answer, by the table above; ``form`` stops after rows 1 (boxed) or 4 (marked).

    ``words``: of a text of one sentence without a number, what it ends with.
    """
    text = _prepared(text)
    text, tagged = _tagged(text)
    boxes = _boxes(text)
    if boxes:
        return Found(boxes[-1], boxes)
    if form == "boxed":
        return None
    marked = _hashes(text, readable) or _phrased(text, readable) or _output(text, readable)
    if marked is not None or (form == "marked" and not tagged):
        return None if marked is None else Found(marked)
    said = next((clause.partition("\n")[0] for clause in _clauses(text)), "") or (
        _stated(text) if words else ""
    )
    loose = _whole(text, readable) or _loose(text, readable) or said
    return Found(loose, words=said) if loose else None


def choice(text: str, form: str = "any") -> str | None:
    """The letter of a multiple-choice answer in a text without a box; ``form`` as in ``final_answer``."""
    text, tagged = _tagged(_prepared(text))
    for clause in _clauses(text):
        found = _letter(clause, first=True)
        if found is not None:
            return found
    return None if form == "marked" and not tagged else _letter(text, first=False)


def _letter(text: str, first: bool) -> str | None:
    """The letter with which a text begins, else the first or last in brackets, or on its own."""
    text = _DENIED.sub(" ", text)
    for pattern in _CHOICES:
        found = deque((match[1] for match in pattern.finditer(text)), maxlen=None if first else 1)
        if found:
            return found[0]
    return None


# --- before and around ---------------------------------------------------------------------------


def _prepared(text: str) -> str:
    thought = deque(_THOUGHT.finditer(text), maxlen=1)
    if thought:
        text = text[thought[0].end() :]
    elif _THINKING.search(text):
        return ""
    marker = _CHAT.search(text)
    while marker is not None and not text[: marker.start()].strip():
        text = text[marker.end() :]
        marker = _CHAT.search(text)
    if marker is not None:
        text = text[: marker.start()]
    if "<<" in text:
        text = _CALCULATION.sub("", text)
    return plain(repaired(text)) if "\\" in text or not text.isascii() else text


def _tagged(text: str) -> tuple[str, bool]:
    _, tag, inner = text.rpartition("<answer>")
    if not tag:
        return text, False
    return inner.partition("</answer>")[0], True


# --- marks ---------------------------------------------------------------------------------------


def _boxes(text: str) -> tuple[str, ...]:
    """Insides of the closed boxes that hold no box themselves, in order; at most the last 64."""
    first = _BOX.search(text)
    if first is None:
        return ()
    found: deque[str] = deque(maxlen=64)
    opened: list[int] = []  # where a box's inside begins; -1 for other braces
    for match in _BRACES.finditer(text, first.start()):
        token = match[0]
        if token[-1] == "{" and token != "\\{":
            opened.append(match.end() if len(token) > 1 else -1)
        elif token == "}" and opened:
            start = opened.pop()
            if start >= 0:
                found.append(text[start : match.start()])
                opened = [-1] * len(opened)  # boxes around this one add nothing
    if not found:
        bare = _BOX.search(text, text.rindex("\\", 0, None)) or first
        word = re.match(r"(\\?[^\s{}$\\]+)", text[bare.end() : bare.end() + 100])
        return (word[1],) if word and not text[bare.end() :].startswith("{") else ()
    return tuple(found)


def _hashes(text: str, readable: Readable) -> str | None:
    start = text.rfind("####")
    if start < 0:
        return None
    line = text[start:].lstrip("#").lstrip(" ").partition("\n")[0][:CLAUSE]
    return line if readable(line) else None


def _output(text: str, readable: Readable) -> str | None:
    """What the last code block printed, where that is one answer."""
    place = text.rfind("```output")
    found = _OUTPUT.match(text, place) if place >= 0 else None
    printed = found[1].strip() if found else ""
    return printed if "\n" not in printed and readable(printed[:CLAUSE]) else None


def _clauses(text: str) -> Iterator[str]:
    """What follows the last phrases that announce an answer, the last one first."""
    places = deque((match.end() for match in ANSWER_PHRASE.finditer(text)), maxlen=PHRASES)
    for place in reversed(places):
        yield text[place : place + CLAUSE].lstrip(" :*_=\t\n")


def _phrased(text: str, readable: Readable) -> str | None:
    for clause in _clauses(text):
        found = _leading(clause, readable)
        if found is not None:
            return found
    return None


def _leading(clause: str, readable: Readable) -> str | None:
    """The answer with which a clause begins, else the last formula or number of its sentence."""
    for start, end in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if clause.startswith(start):
            inner, closed, after = _closed(clause[len(start) :], end)
            if closed and readable(inner):
                percent = re.match(r"\s*(?:\\?%|percent\b)", after)
                return inner + ("%" if percent and "%" not in inner else "")
    end_of_sentence = _SENTENCE.search(clause)
    sentence = clause[: end_of_sentence.start()] if end_of_sentence else clause
    for part in (sentence, *(sentence[: cut.start()] for cut in _CUT.finditer(sentence[:300]))):
        if part.strip() and readable(part):
            return part
    return _loose(sentence, readable)


def _closed(text: str, end: str) -> tuple[str, str, str]:
    """A text parted at the end of a formula; an escaped dollar does not end one."""
    if end not in ("$", "$$"):
        return text.partition(end)
    found = _DOLLAR.search(text)
    return (text[: found.start()], found[0], text[found.end() :]) if found else (text, "", "")


# --- no mark -------------------------------------------------------------------------------------


def _whole(text: str, readable: Readable) -> str | None:
    stripped = text.strip()
    word = _WORD.match(stripped)
    if spoken(stripped.strip(" .")) is not None:
        return stripped
    if not stripped or (word and word[0].lower() in FILLERS):
        return None
    if len(stripped) <= MAX_WHOLE and readable(stripped):
        return stripped
    return stripped if _WORDS.search(_COMMANDS.sub("", stripped)) is None else None


def _loose(text: str, readable: Readable) -> str | None:
    """The last formula that is an answer, or a number in a later sentence.

    A formula of letters only gives way to any number behind it.
    """
    text = _CODE.sub(" ", text)
    for start, end in _formulas(text):
        inner = text[start:end].strip().strip("$")
        if not inner or len(inner) > MAX_WHOLE or inner.endswith(_OPEN_END) or not readable(inner):
            continue
        after = text[end:]
        if any(each.isdigit() for each in inner) and not inner.endswith("."):
            over = _SENTENCE.search(after)
            later = _number(after[over.end() :]) if over else None
        else:
            later = _number(after)
        if later is not None:
            return later
        percent = re.match(r"(?:\$|\\\)|\\\])+\s*(?:\\?%|percent\b|pct\b)", after)
        return inner + ("%" if percent else "")
    return _shaped(text, readable) or _number(text)


def _shaped(text: str, readable: Readable) -> str | None:
    """What the text ends with behind a verb, where it is more than a number: ``The vertex is (1, -1).``"""
    for _, tail in _said(text):
        if _SHAPED.search(tail) and not _CONNECTED.search(tail) and readable(tail):
            return tail
    return None


def _said(text: str) -> Iterator[tuple[re.Match[str], str]]:
    """What the last line says of something: all behind the verb or the sign, for each of them."""
    line = text.rstrip(" \n.!")[-SENTENCE:].rpartition("\n")[2]
    for found in _SAID.finditer(line):
        yield found, line[found.end() :]


def _stated(text: str) -> str:
    """The words at the end of a text of one sentence: ``The day is Thursday.``; or its yes or no."""
    found = _YES.match(text)
    if found is not None:
        return found[1]
    single = len(text) < SENTENCE and not re.search(r"[.!?\n]\s*\S", text.strip())
    said = (tail for verb, tail in _said(text) if not verb["equal"])
    return next(said, "") if single else ""


def _formulas(text: str) -> Iterator[tuple[int, int]]:
    """Insides of the last formulas, the last one first."""
    dollars = deque((match.span() for match in _DOLLAR.finditer(text)), maxlen=FORMULAS + 1)
    # A dollar before a digit opens a formula or is money, and closes nothing.
    spans = [
        (dollars[i - 1][1], dollars[i][0])
        for i in range(len(dollars) - 1, 0, -1)
        if not text[dollars[i][1] : dollars[i][1] + 1].isdigit()
    ]
    for opening, closing in ((r"\[", r"\]"), (r"\(", r"\)")):
        end = len(text)
        for _ in range(FORMULAS):
            end = text.rfind(closing, 0, end)
            start = text.rfind(opening, 0, end) if end >= 0 else -1
            if start < 0:
                break
            spans.append((start + 2, end))
            end = start
    yield from sorted(spans, key=lambda span: span[1], reverse=True)


def _number(text: str) -> str | None:
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    if last is None:
        return None
    body = last["body"]
    if last["comma"]:
        body += "." + last["comma"][1:] if body.isdigit() else ""
    sign = "-" if (last["sign"] or "").startswith("-") else ""
    return sign + body.replace("x", "*") + ("%" if last["percent"] else "")
