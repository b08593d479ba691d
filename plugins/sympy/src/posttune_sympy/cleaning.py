"""Writing an answer in one way: unicode mathematics, escapes gone wrong, dollar signs, markdown around it."""

from __future__ import annotations

import re
import unicodedata

from posttune_sympy.words import CONTROL_LETTERS, CONTROLS, DOUBLE_BACKSLASH

_CHARACTERS = {
    "−": "-",
    "–": "-",
    "—": "-",
    "‐": "-",
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "∙": r"\cdot ",
    "÷": r"\div ",
    "⁄": "/",
    "∕": "/",
    "π": r"\pi ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "⩽": r"\le ",
    "≥": r"\ge ",
    "⩾": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "≡": r"\equiv ",
    "∈": r"\in ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∖": r"\setminus ",
    "∅": r"\emptyset ",
    "±": r"\pm ",
    "∓": r"\mp ",
    "√": r"\sqrt ",
    "∛": r"\sqrt[3]",
    "°": r"^\circ ",
    "º": r"^\circ ",
    "′": "'",
    "⇒": r"\Rightarrow ",
    "→": r"\to ",
    "∠": r"\angle ",
    "ℝ": "R",
    "⌊": r"\lfloor ",
    "⌋": r"\rfloor ",
    "⌈": r"\lceil ",
    "⌉": r"\rceil ",
    "，": ",",
    "；": ";",
    "：": ":",
    "（": "(",
    "）": ")",
    "％": "%",
    "。": ".",
    "、": ",",
    "“": '"',
    "”": '"',
    "’": "'",
    "‘": "'",
    "\u00a0": " ",
    "\u2009": " ",
    "\u202f": " ",
    "\u3000": " ",
    "\u200b": "",
    "\ufeff": "",
}
_TABLE = str.maketrans(_CHARACTERS)
_DIRECTIONS = dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F])
_RAISED = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+")
_LOWERED = re.compile("[₀-₉]+")
_SCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ₀₁₂₃₄₅₆₇₈₉", "0123456789+-n0123456789")
_DIGIT = re.compile(r"(?![0-9])\d")
_VULGAR = re.compile("[¼-¾⅐-⅞↉]")
_EDGES = ' \t\n\r\x0b\x0c*`_"'
_SYSTEM = re.compile(
    r"\\left\s*\\\{\s*\\begin\{(array|aligned|matrix|cases)\}(?:\{[a-z]*\})?(.*)\\end\{\1\}\s*(?:\\right\s*\.)?",
    re.DOTALL,
)
_TIMES_TEN = re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)")
_MARKUP = re.compile(r"\\(?:label|tag)\{[^{}]*\}|\\(?:h|v)space\*?\{[^{}]*\}|\\(?:color|textcolor)\{[^{}]*\}")
_STOPS = " \t\n\r.,;:。"
_SPACES = ("\\,", "\\;", "\\:", "\\!", "\\ ", "\\quad", "\\qquad", "\\\\")
_ROUNDS = 20  # of peeling; more layers than these are left on


def repaired(text: str) -> str:
    r"""Commands whose backslash was lost to an escape (form feed + ``rac``) or doubled (``\\frac``)."""
    if CONTROLS.search(text):
        text = CONTROLS.sub(lambda match: CONTROL_LETTERS[match[0]], text)
    return DOUBLE_BACKSLASH.sub(r"\\", text) if "\\\\" in text else text


def plain(text: str) -> str:
    """Unicode mathematics as LaTeX; digits of other scripts as ASCII. Text in other scripts stays."""
    if text.isascii():
        return text
    text = _RAISED.sub(lambda match: "^{" + match[0].translate(_SCRIPTS) + "}", text)
    text = _LOWERED.sub(lambda match: "_{" + match[0].translate(_SCRIPTS) + "}", text)
    text = _VULGAR.sub(_fraction, text)
    text = text.translate(_TABLE).translate(_DIRECTIONS)
    if text.isascii():
        return text
    text = _DIGIT.sub(lambda match: str(unicodedata.decimal(match[0])), text)
    return unicodedata.normalize("NFKC", text)


def clean(answer: str) -> str:
    """An answer without what surrounds it: spaces, math delimiters, markdown, a full stop."""
    text = _MARKUP.sub("", plain(repaired(answer))).replace("\x00", " ")
    if "\\left" in text:
        text = _SYSTEM.sub(r"\\begin{cases}\2\\end{cases}", text)
    text = _TIMES_TEN.sub(r"\\times ", text)
    for _ in range(_ROUNDS):
        previous, text = text, _undelimited(_without_end(text.strip(_EDGES)))
        if text == previous:
            break
    return text


def letters(text: str) -> str:
    r"""What remains to compare two texts by: letters and digits, in one case, ``\text{...}`` unwrapped."""
    bare = re.sub(r"\\(?:text|mathrm|mbox|textbf|textit|textrm|textnormal|operatorname)\b", "", text)
    return "".join(each for each in bare.casefold() if each.isalnum())


def compact(text: str) -> str:
    """A text without spaces and without the commands that only change its looks: equal means equal."""
    text = re.sub(r"\\(?:left|right|displaystyle|[,;:! ])|[~$]|(?<!\d)\s|\s(?!\s*\d)", "", text)
    return re.sub(r"\\[dtc]frac", r"\\frac", text)


def _fraction(match: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", match[0]).partition("⁄")
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def _without_end(text: str) -> str:
    text = text.rstrip(_STOPS)
    space = next((space for space in _SPACES if text.endswith(space)), "")
    text = text.removesuffix(space)
    return text[:-1] if text.endswith("\\") else text


def _undelimited(text: str) -> str:
    for start, end in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("'", "'")):
        if text.startswith(start) and text.endswith(end) and len(text) >= len(start) + len(end):
            inner = text[len(start) : -len(end)]
            if start not in inner and end not in inner:
                return inner
    return text
