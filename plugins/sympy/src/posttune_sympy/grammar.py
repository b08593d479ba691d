"""The grammar of answers: a Pratt parser over tokens. Depth and size are bounded, nothing is evaluated."""

from __future__ import annotations

from collections.abc import Sequence

from posttune_sympy import brackets, commands, literals
from posttune_sympy.lexing import Token, tokens
from posttune_sympy.nodes import Node, Unreadable, number, product, symbol, walk
from posttune_sympy.precedence import (
    COMMA,
    MAX_DEPTH,
    MAX_POSTFIX,
    PERCENT,
    POSTFIX,
    POWER,
    PRODUCT,
    RATIO,
    RELATION,
    RELATIONS,
    SEMICOLON,
    SET,
    SETS,
    SIGN,
    SUM,
    THEN,
    UNIT,
)
from posttune_sympy.spoken import SCALES
from posttune_sympy.words import FILLERS, NAMES

_INFIX = {
    "then": THEN,
    ";": SEMICOLON,
    ",": COMMA,
    "row": COMMA,
    **dict.fromkeys(RELATIONS, RELATION),
    **dict.fromkeys(SETS, SET),
    ":": RATIO,
    "over": RATIO,
    "choose": RATIO,
    **dict.fromkeys(("+", "-", "pm", "mp"), SUM),
    **dict.fromkeys(("*", "/", "mod", "pmod"), PRODUCT),
    "%": PERCENT,
    "^": POWER,
    **dict.fromkeys(("!", "deg", "'"), POSTFIX),
}
_CLOSING = {
    "(": (")", "]"),
    "[": (")", "]"),
    "{": ("}",),
    r"\{": (r"\}",),
    "floor": ("floor",),
    "ceil": ("ceil",),
}
_APPLIED = frozenset("fghFGH")
ORDERED = frozenset({"<", ">", "<=", ">=", "!="})
ANY = symbol("?")  # stands for whatever is compared: ">= 5"
_END = Token("end", "")


def parse(text: str, *, lists: bool = False) -> Node:
    """The tree of a cleaned answer. ``lists``: a comma between digits parts a list.

    Raises Unreadable for what is not in the grammar or over its limits.
    """
    found = brackets.turned(literals.commas(tokens(text), lists))
    try:
        return Parser(brackets.unwrapped(found)).whole()
    except RecursionError as error:
        raise Unreadable("nested too deep for this stack") from error


class Parser:
    """One pass over the tokens of an answer."""

    def __init__(self, found: Sequence[Token], depth: int = 0) -> None:
        self.tokens = list(found)
        self.position = 0
        self.depth = depth
        self.bars = False  # inside |...|, where a bar closes

    def whole(self) -> Node:
        """All tokens as one answer."""
        node = self.expression(0)
        if self.peek.kind != "end":
            raise Unreadable(f"unexpected {self.peek.value!r}")
        return node

    def part(self, found: Sequence[Token]) -> Node:
        """The tree of a part of the tokens, as deep as this one stands."""
        return Parser(found, self.depth).whole()

    def descend(self) -> None:
        """One level deeper. Raises Unreadable beyond the limit."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deep")

    @property
    def peek(self) -> Token:
        """The next token."""
        return self.tokens[self.position] if self.position < len(self.tokens) else _END

    def take(self) -> Token:
        """The next token, consumed."""
        token = self.peek
        self.position += 1
        return token

    def taken(self, kind: str, *values: str) -> bool:
        """Whether the next token was this one; then it is consumed."""
        if self.peek.kind == kind and (not values or self.peek.value in values):
            self.position += 1
            return True
        return False

    def expression(self, minimum: int) -> Node:
        """An expression whose operators bind at least as tightly as ``minimum``."""
        self.descend()
        left = self.prefix()
        postfixes = 0
        while (power := self.binding(left)) >= max(minimum, 1):
            postfixes += power >= PERCENT
            if postfixes > MAX_POSTFIX:
                raise Unreadable("too many postfix operators")
            left = self.infix(left, power)
        self.depth -= 1
        return left

    def binding(self, left: Node) -> int:
        """How tightly the next token binds to the left; 0 where it does not."""
        token = self.peek
        if token.kind in ("op", "sep"):
            if token.value == "|" and not self.bars:
                return PRODUCT
            return _INFIX.get(token.value, 0)
        if token.kind == "text":
            return UNIT
        if token.kind in ("end", "close") or left.head == "unit":
            return 0
        if token.value == "pmod":
            return PRODUCT
        return 0 if token.value.startswith("end:") else PRODUCT

    # --- what stands first ---------------------------------------------------------------------

    def prefix(self) -> Node:
        """An operand, with the signs and words before it."""
        token = self.take()
        if token.kind == "num":
            return self.numeral(token)
        if token.kind == "sym":
            return self.named(token.value)
        if token.kind == "open":
            return self.bracketed(token.value)
        if token.kind == "fn":
            return commands.function(self, token.value)
        if token.kind == "cmd":
            return commands.command(self, token.value)
        if token.kind == "text":
            return self.worded(token.value)
        return self.signed(token.value)

    def signed(self, operator: str) -> Node:
        """A sign, a bar, or a relation with nothing before it."""
        if operator == "-":
            return Node("neg", (self.expression(PRODUCT),))
        if operator == "+":
            return self.expression(PRODUCT)
        if operator in ("pm", "mp"):
            return Node(operator, (number(0), self.expression(PRODUCT)))
        if operator == "|":
            outer, self.bars = self.bars, True
            inner = self.expression(0)
            self.bars = outer
            if not self.taken("op", "|"):
                raise Unreadable("a bar is not closed")
            return Node("det" if inner.head == "matrix" else "abs", (inner,))
        if operator in ("=", "~", ":"):
            return self.expression(RELATION)
        if operator in ORDERED:
            return Node("rel", ((operator,), ANY, self.expression(RELATION + 1)))
        raise Unreadable(f"nothing before {operator!r}")

    def worded(self, text: str) -> Node:
        """Words before a value: fillers and currencies go, a name before ``=`` stays."""
        if self.peek.value in ("=", "~"):
            return symbol(text)
        if all(word in FILLERS for word in text.split()) or text == "$" or self.taken("op", ":"):
            return self.priced() if text == "$" else self.prefix()
        if self.peek.kind == "open" and all(word in FILLERS or word in NAMES for word in text.split()):
            return self.prefix()
        raise Unreadable(f"the word {text!r}")

    def priced(self) -> Node:
        """What stands behind a currency sign."""
        value = self.expression(UNIT)
        return Node("unit", (value, "dollar")) if value.head in ("num", "neg") else value

    def numeral(self, token: Token) -> Node:
        """A number: with a base, a recurring part, or a fraction behind it."""
        if token.value.endswith(".") and self.taken("cmd", "overline"):
            return literals.recurring(token.value, self.raw_argument())
        value = literals.numeral(token.value)
        if self.peek.value == "overline":
            self.take()
            return literals.recurring(token.value, self.raw_argument())
        if self.peek == Token("op", "_"):
            self.take()
            return Node("base", (token.value, self.raw_argument()))
        mixed = literals.mixed(value, self.tokens, self.position)
        if mixed is not None:
            node, self.position = mixed
            return node
        if self.peek.kind == "num":
            raise Unreadable("two numbers side by side")
        return value

    def named(self, name: str) -> Node:
        """A variable, with subscript and primes; or f(x)."""
        if self.peek.kind == "op" and self.peek.value == "_":
            self.take()
            name = f"{name}_{self.raw_argument()}"
        if name in ("P", "Pr", "E") and self.peek == Token("open", "(") and (event := self.event()):
            return symbol(f"{name}({event})")
        while self.taken("op", "'"):
            name += "'"
        if name[:1] in _APPLIED and self.peek.value == "(" and not self.peek.gap:
            return Node("fn", (name, *commands.arguments(self)))
        return symbol(name)

    def event(self) -> str:
        """The text of ``(A | B)`` or ``(A \\cap B)``, consumed; nothing where it is a plain product."""
        depth, end = 0, self.position
        for end in range(self.position, len(self.tokens)):
            token = self.tokens[end]
            depth += (token.kind == "open") - (token.kind == "close")
            if depth == 0:
                break
        inside = self.tokens[self.position + 1 : end]
        if depth or not any(token.value in ("|", "cup", "cap", "=", *ORDERED) for token in inside):
            return ""
        self.position = end + 1
        return " ".join(token.value for token in inside)

    def bracketed(self, opening: str) -> Node:
        """What stands between brackets; single values lose theirs, sets keep them."""
        outer, self.bars = self.bars, False
        if opening == r"\{":
            self.position += self.builds_a_set()
        items = [] if self.peek.kind == "close" else _items(self.expression(0))
        self.bars = outer
        closing = self.take()
        if closing.kind != "close" or closing.value not in _CLOSING[opening]:
            raise Unreadable("a bracket is not closed")
        if opening in ("floor", "ceil"):
            return Node("fn", (opening, *items))
        if len(items) == 1 and (opening != r"\{" or items[0].head == "rel"):
            return items[0]
        return Node("group", (opening, closing.value, *items))

    def builds_a_set(self) -> int:
        """Tokens of ``x |``, ``x :`` or ``x \\in R |`` that stand next: only the condition counts. Else 0."""
        found = [token.value for token in self.tokens[self.position : self.position + 6]]
        for reals in ([], ["in", "R"], ["in", "{", "R", "}"]):
            length = len(reals) + 2
            if found[1 : length - 1] == reals and found[length - 1 : length] in (["|"], [":"]):
                return length if self.peek.kind == "sym" else 0
        return 0

    def raw_argument(self) -> str:
        """The plain text of a subscript: one token, or a group."""
        token = self.take()
        if token.kind != "open":
            return token.value
        parts: list[str] = []
        depth = 1
        while depth:
            token = self.take()
            if token.kind == "end":
                raise Unreadable("a subscript is not closed")
            depth += (token.kind == "open") - (token.kind == "close")
            parts.append(token.value)
        return "".join(parts[:-1])

    # --- what follows --------------------------------------------------------------------------

    def infix(self, left: Node, power: int) -> Node:
        """``left`` joined with what follows it."""
        token = self.peek
        if power == UNIT:
            return self.measured(left)
        if token.kind not in ("op", "sep") or token.value == "|":
            if token.value == "pmod":
                self.take()
                return Node("modulo", (left, commands.operand(self)))
            return product(left, self.expression(SIGN))
        self.take()
        if power in (SEMICOLON, COMMA):
            return self.listed(left, power)
        if power == RELATION:
            return self.related(left, token.value)
        if power == THEN:
            return left if self.peek.kind == "end" else self.expression(SEMICOLON)
        if token.value in ("!", "deg", "'", "%"):
            return _postfix(left, token.value)
        if token.value == "^":
            return self.raised(left)
        return _binary(token.value, left, self.expression(power + 1))

    def listed(self, left: Node, power: int) -> Node:
        """``a, b``; empty places (``, and``) are passed over."""
        while self.peek.kind == "sep" and _INFIX[self.peek.value] >= power:
            self.take()
        if self.peek.kind in ("end", "close"):
            return left
        right = self.expression(power + 1)
        head = "seq" if power == COMMA else "rows"
        return Node(head, (*(left.args if left.head == head else (left,)), right))

    def related(self, left: Node, operator: str) -> Node:
        """A chain of relations as one node."""
        right = self.expression(RELATION + 1)
        if left.head == "rel":
            operators, *sides = left.args
            return Node("rel", ((*operators, operator), *sides, right))
        return Node("rel", ((operator,), left, right))

    def measured(self, left: Node) -> Node:
        """A value and the words behind it: its unit. Only what holds a number is measured."""
        if not any(each.head == "num" or each == symbol("pi") for each in walk(left)):
            raise Unreadable("words behind a name")
        words: list[str] = []
        while self.peek.kind == "text" or (words and (self.peek.kind == "sym" or self.peek.value in "/^*-")):
            token = self.take()
            words.append(token.value)
            if token.value == "^":
                words.append(self.raw_argument())
            elif self.peek.kind == "end":
                break
        if "if" in words:
            raise Unreadable("a condition")
        if words[0].split()[0] in SCALES:
            scale, *rest = " ".join(words).split()
            left, words = product(left, number(SCALES[scale])), rest
            if not words:
                return left
        return Node("unit", (left, " ".join(words)))

    def raised(self, base: Node) -> Node:
        """A power, a degree sign, or an ordinal's ending."""
        if self.taken("op", "deg") or (base.head == "num" and self.taken("sym", "o")):
            return Node("deg", (base,))
        if self.peek.kind == "open" and self.position + 2 < len(self.tokens):
            inner, closing = self.tokens[self.position + 1 : self.position + 3]
            if closing.kind == "close" and (inner.value in ("deg", "'") or inner.kind == "text"):
                self.position += 3
                return base if inner.kind == "text" else _postfix(base, inner.value)
        if self.taken("text"):
            return base
        if self.taken("op", "-"):
            return Node("pow", (base, Node("neg", (self.expression(POWER),))))
        self.taken("op", "+")
        if self.peek.kind != "num":
            return Node("pow", (base, self.expression(POWER)))
        exponent = literals.numeral(self.take().value)
        return Node("pow", (base, self.raised(exponent) if self.taken("op", "^") else exponent))


def _items(node: Node) -> list[Node]:
    return list(node.args) if node.head in ("seq", "rows") else [node]


def _binary(operator: str, left: Node, right: Node) -> Node:
    if operator == "*":
        return product(left, right)
    if operator in ("/", "over"):
        return product(left, Node("inv", (right,)))
    if operator == "choose":
        return Node("binom", (left, right))
    if operator in ("+", "-"):
        if operator == "-" and left == symbol("R") and right.head == "group":
            return Node("minus", (left, right))
        terms = left.args if left.head == "add" else (left,)
        return Node("add", (*terms, right if operator == "+" else Node("neg", (right,))))
    if operator == ":":
        return Node("ratio", (*(left.args if left.head == "ratio" else (left,)), right))
    return Node(SETS.get(operator, operator), (left, right))


def _postfix(base: Node, operator: str) -> Node:
    if operator == "'":
        return symbol(f"{base.args[0]}'") if base.head == "sym" else Node("fn", ("prime", base))
    return Node({"!": "fact", "%": "percent", "deg": "deg"}[operator], (base,))
