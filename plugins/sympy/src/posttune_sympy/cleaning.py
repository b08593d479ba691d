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
    "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}",
    "ℚ": r"\mathbb{Q}",
    "ℕ": r"\mathbb{N}",
    "ℂ": r"\mathbb{C}",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "Ø": r"\emptyset ",
    "∑": r"\sum ",
    "∏": r"\prod ",
    "∫": r"\int ",
    "¢": r"\text{ cents}",
    "…": r"\dots ",
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
_GREEK = {
    unicodedata.lookup(f"GREEK {size} LETTER {name.upper().replace('LAMBDA', 'LAMDA')}"): rf"\{name} "
    for size, names in (
        (
            "SMALL",
            "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi",
        ),
        ("SMALL", "chi psi omega"),
        ("CAPITAL", "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"),
    )
    for name in names.split()
}
_TABLE = str.maketrans(_CHARACTERS)
_GREEK_RUN = re.compile(r"[\u0370-\u03ff]+")
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
_DOTS = re.compile(r"(?<=[,\s])\.\.\.+(?=[,\s])")
_PLUS_MINUS = re.compile(r"\+\s*/\s*-")
_MODULO = re.compile(r"\(\s*(?:\\(?:text|mathrm|b?mod)?\s*\{?\s*)?(?:mod)?\s*\}?\s+(\w{1,20})\s*\)")
_NOT_EQUAL = re.compile(r"\\not\s*=")
_INCHES = re.compile(r"(?<=\d)\s*\bin(?=\.?\s*$|\s*\^)")
_MINUS = re.compile(r"\A\s*(?:minus|negative)\s+(?=[\d.\\])")
_CELSIUS = re.compile(
    r"\^\s*\{?\s*\\circ\s*\}?\s*(?:\\[,; ])?\s*(?:[CF]|\\(?:text|mathrm)\s*\{\s*[CF]\s*\})(?=[\s$.]*\Z)"
)
_AMPERSAND = re.compile(r"(?<=\s)\\?&(?=\s)")
_UNIT_FRACTION = re.compile(
    r"\\[dt]?frac\s*\{\s*\\(?:text|mathrm)\s*\{\s*([A-Za-z ]+?)\s*\}\s*\}"
    r"\s*\{\s*\\(?:text|mathrm)\s*\{\s*([A-Za-z ]+?)\s*\}\s*\}"
)
_UNION = re.compile(r"(?<=[)\]])\s*U\s*(?=[(\[])")
_MICRO = re.compile(r"\\mu\s*\\(text|mathrm)\{\s*")
_HALF_LINE = re.compile(
    r"(?:\\mathbb\s*\{\s*R\s*\}|\\mathbb\s+R|\bR)\s*(?:\^|_)\s*"
    r"(?:\{\s*(?P<inside>[+-]|(?:>|<|\\geq?|\\leq?)\s*0)\s*\}|(?P<sign>[+-])(?=\s*$))"
)
_HALF_LINES = {"+": r"(0,\infty)", ">0": r"(0,\infty)", "-": r"(-\infty,0)", "<0": r"(-\infty,0)"} | {
    f"\\{name}0": interval
    for names, interval in ((("ge", "geq"), r"[0,\infty)"), (("le", "leq"), r"(-\infty,0]"))
    for name in names
}
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
    # A longer run is a word of Greek.
    text = _GREEK_RUN.sub(
        lambda match: match[0] if len(match[0]) > 2 else "".join(_GREEK.get(each, each) for each in match[0]),
        text,
    )
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
    text = _rewritten(_TIMES_TEN.sub(r"\\times ", text))
    for _ in range(_ROUNDS):
        previous, text = text, _undelimited(_without_end(text.strip(_EDGES)))
        if text == previous:
            break
    return text


def _rewritten(text: str) -> str:
    """Notations of a few places in those that are read: +/-, R^+, 2 & 3, ..., micrometres."""
    text = _PLUS_MINUS.sub(r"\\pm ", text)
    if "mod" in text:
        text = _MODULO.sub(r"\\pmod{\1}", text)
    text = _NOT_EQUAL.sub(r"\\ne ", _INCHES.sub(r"\\text{ in}", _MINUS.sub("-", text)))
    text = _CELSIUS.sub(r"\\text{ degrees}", text).replace(r"\textdollar", r"\$")
    text = _DOTS.sub(r"\\dots ", text)
    text = _UNIT_FRACTION.sub(r"\\text{ \1/\2}", text) if "frac" in text else text
    text = _UNION.sub(r" \\cup ", text) if "U" in text else text
    text = _MICRO.sub(r"\\\1{micro", text)
    if "&" in text and "\\begin" not in text:
        text = _AMPERSAND.sub(r"\\text{and}", text)
    if "R" in text:
        text = _HALF_LINE.sub(
            lambda match: _HALF_LINES[(match["inside"] or match["sign"]).replace(" ", "")], text
        )
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
