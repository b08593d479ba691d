"""The vocabulary: functions, LaTeX commands, units, connectives, and the phrases that announce an answer."""

from __future__ import annotations

import re


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FUNCTIONS = _words(
    """sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh coth
    log ln lg exp cis sqrt abs floor ceil gcd lcm max min binom factorial"""
)
# Other names of the same function.
FUNCTION_ALIASES = {
    "asin": "arcsin",
    "acos": "arccos",
    "atan": "arctan",
    "ceiling": "ceil",
    "cbrt": "cbrt",
    "cosec": "csc",
    "tg": "tan",
    "ctg": "cot",
    "arctg": "arctan",
}

# LaTeX commands that stand for one character or word of the plain notation.
SYMBOLS = {
    "pi": "pi",
    "infty": "oo",
    "infin": "oo",
    "imath": "i",
    "varphi": "phi",
    "varepsilon": "epsilon",
    "vartheta": "theta",
    "ell": "l",
    "emptyset": "emptyset",
    "varnothing": "emptyset",
    "R": "R",
    "ldots": "dots",
    "cdots": "dots",
}
OPERATORS = {
    "cdot": "*",
    "times": "*",
    "ast": "*",
    "div": "/",
    "over": "over",
    "choose": "choose",
    "pm": "pm",
    "mp": "mp",
    "le": "<=",
    "leq": "<=",
    "leqslant": "<=",
    "ge": ">=",
    "geq": ">=",
    "geqslant": ">=",
    "lt": "<",
    "gt": ">",
    "ne": "!=",
    "neq": "!=",
    "approx": "~",
    "simeq": "~",
    "sim": "~",
    "doteq": "~",
    "equiv": "=",
    "coloneqq": "=",
    "in": "in",
    "subset": "subset",
    "subseteq": "subset",
    "cup": "cup",
    "bigcup": "cup",
    "cap": "cap",
    "setminus": "minus",
    "backslash": "minus",
    "bmod": "mod",
    "mod": "mod",
    "colon": ":",
    "vert": "|",
    "lvert": "|",
    "rvert": "|",
    "mid": "|",
    "circ": "deg",
    "degree": "deg",
    "prime": "'",
    "lor": ",",
    "vee": ",",
    "land": ",",
    "wedge": ",",
    "implies": "then",
    "Rightarrow": "then",
    "Longrightarrow": "then",
    "iff": "then",
    "Leftrightarrow": "then",
    "to": "to",
    "rightarrow": "to",
    "longrightarrow": "to",
}
BRACKETS = {
    "lfloor": ("open", "floor"),
    "rfloor": ("close", "floor"),
    "lceil": ("open", "ceil"),
    "rceil": ("close", "ceil"),
    "lbrace": ("open", r"\{"),
    "rbrace": ("close", r"\}"),
    "lbrack": ("open", "["),
    "rbrack": ("close", "]"),
    "lparen": ("open", "("),
    "rparen": ("close", ")"),
    "langle": ("open", "("),
    "rangle": ("close", ")"),
}
BIG = {"sum": "sum", "prod": "prod", "int": "int", "lim": "lim"}
# Appearance only: the command goes, its argument stays.
IGNORED = _words(
    """left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr middle displaystyle textstyle
    scriptstyle limits nolimits quad qquad space thinspace hspace phantom hline noindent nonumber mathbf
    boldsymbol bm mathbb mathcal mathfrak mathsf mathit bold bf it rm vec hat bar tilde widehat widetilde
    overrightarrow underline operatorname mathop boxed fbox color normalsize large Large tiny
    triangle small enspace kern strut negthinspace allowbreak"""
)
TEXT_COMMANDS = _words(
    "text textbf textit textrm textnormal textsf texttt textup mbox hbox mathrm operatorname emph"
)

PERCENT = frozenset({"percent", "pct", "percentage", "per cent", "percents"})
SEPARATORS = frozenset({"and", "or", "und", "oder", "et", "ou", "y", "o", "и", "或", "和", "&"})
# A word of up to three letters is a product of variables unless it stands here.
SHORT_UNITS = _words(
    """mm cm dm km mg kg lb lbs oz ft yd mi ml cl dl hr hrs min sec ms mph kph kmh rpm sq cu pts cts ct deg
    rad usd eur gbp inr rs day bit yen gal qt pt doz ton wk yr yrs hz khz kw kwh"""
)
LETTER_UNITS = frozenset("mgshLNJWVAKC") | {"Omega", "mu"}
# Words before a value that say nothing about it.
FILLERS = _words(
    """option choice yes no answer's about approximately approx roughly around exactly only just simply
    equals equal is are the a an be therefore thus hence so rs usd eur inr answer value result total it's its
    now"""
)
# Words before a point, a set or a value in brackets that name what it is.
NAMES = _words(
    """point points pair pairs ordered triple vertex vertices center centre focus foci intercept coordinates
    coordinate interval solution solutions set vector matrix root roots with of for all in where x"""
)
# Words of two and three letters that are prose, never a product of variables.
SHORT_WORDS = _words(
    """is we of to it so my he she if the for not but are has had was can you her his its our one two six ten
    all any who how why get got put see say now yes nor per sum let"""
)
ENVIRONMENTS = _words(
    """matrix pmatrix bmatrix Bmatrix vmatrix Vmatrix smallmatrix array cases aligned align align* alignedat
    gathered gather gather* equation equation* eqnarray eqnarray* split"""
)

_COMMANDS = (
    FUNCTIONS
    | SYMBOLS.keys()
    | OPERATORS.keys()
    | BRACKETS.keys()
    | BIG.keys()
    | IGNORED
    | TEXT_COMMANDS
    | _words(
        """frac dfrac tfrac cfrac nicefrac overline dot binom dbinom tbinom begin end pmod
        alpha beta gamma theta lambda mu"""
    )
) - {"R", "to", "in", "it", "rm", "bf", "o"}
DOUBLE_BACKSLASH = re.compile(
    r"(?<!\\)\\\\(?=(?:" + "|".join(sorted(_COMMANDS, key=len, reverse=True)) + r")(?![A-Za-z]))"
)
r"""A command whose backslash was escaped twice: ``\\frac``."""

CONTROLS = re.compile(
    r"\x0c(?=rac\b|rac\{|loor)|\x08(?=oxed|inom|egin|eta\b|ar\b)|\t(?=ext|imes|heta|frac)|\r(?=ight)"
)
r"""A control character that was ``\f``, ``\b``, ``\t`` or ``\r`` of a command before it was unescaped."""
CONTROL_LETTERS = {"\x0c": r"\f", "\x08": r"\b", "\t": r"\t", "\r": r"\r"}

ANSWER_PHRASE = re.compile(
    r"""
      \b(?:final\s+)?(?:answer|result)s?\b(?!\s+(?:choice|key)s?\b)   # the answer ... is
        [^.\n:=]{0,60}?(?:\bis\b|\bare\b|\bequals?\b|\bbe\b|:|=|(?=\s*[*_]*\s*\$|\s*\\[(\[]))
    | \bfinal\s+answer\b
    | ^\s*[*_]*A[*_]*:                                          # a line "A: 42"
    | \b(?:respuesta|réponse|resposta|risposta)\b[^.\n:=]{0,40}?(?:\bes\b|\best\b|é|è|:|=)
    | \b(?:Antwort|Ergebnis)\b[^.\n:=]{0,40}?(?:\bist\b|\blautet\b|:|=)
    | \bответ\w*\b\s*(?:—|-|:|=)?
    | (?:答案|答え)(?:是|为|為|は|：|:)?
    """,
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
r"""What announces an answer; the answer follows."""
