"""Functions and LaTeX commands with arguments: fractions, roots, sums, integrals, limits, matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttune_sympy import literals
from posttune_sympy.lexing import Token
from posttune_sympy.nodes import Node, Unreadable, in_radians, number, product, substituted, symbol, walk
from posttune_sympy.precedence import PERCENT, POWER, PRODUCT
from posttune_sympy.words import ENVIRONMENTS

if TYPE_CHECKING:
    from posttune_sympy.grammar import Parser

TRIGONOMETRIC = frozenset({"sin", "cos", "tan", "cot", "sec", "csc"})
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan", "cot": "arccot"}
_MINUS_ONE = Node("neg", (number(1),))


def function(parser: Parser, name: str) -> Node:
    r"""``\sin 2x``, ``\sin^2 x``, ``\log_2 8``, ``gcd(4, 6)``."""
    base = power = None
    while parser.peek.value in ("^", "_") and parser.peek.kind == "op":
        if parser.take().value == "_":
            base = operand(parser)
        else:
            power = operand(parser)
    if name in ("sqrt", "cbrt"):
        return Node("root", (arguments(parser)[0], number(2 if name == "sqrt" else 3)))
    if power == _MINUS_ONE and name in _INVERSE:
        name, power = _INVERSE[name], None
    values = arguments(parser)
    if name in TRIGONOMETRIC:
        values = [in_radians(value) for value in values]
    node = _applied(name, values, base)
    return node if power is None else Node("pow", (node, power))


def _applied(name: str, values: list[Node], base: Node | None) -> Node:
    if name == "lg":
        name, base = "log", number(10)
    name = "log" if name == "ln" else name
    if name == "cis":
        angle = in_radians(values[0])
        return Node("add", (Node("fn", ("cos", angle)), product(symbol("i"), Node("fn", ("sin", angle)))))
    if name == "exp":
        return Node("pow", (symbol("e"), values[0]))
    if name == "abs":
        return Node("abs", (values[0],))
    if name == "factorial":
        return Node("fact", (values[0],))
    if name == "binom":
        if len(values) != 2:
            raise Unreadable("a binomial coefficient of other than two")
        return Node("binom", (values[0], values[1]))
    node = Node("fn", (name, *values))
    if name == "log" and base is not None:
        return Node("mul", (node, Node("inv", (Node("fn", ("log", base)),))))
    return node


def arguments(parser: Parser) -> list[Node]:
    """What a function is applied to: a bracket, or the product that follows it."""
    if parser.peek.kind == "open" and parser.peek.value in ("(", "[", "{"):
        opening = parser.take().value
        inner = parser.bracketed(opening)
        return list(inner.args[2:]) if inner.head == "group" and inner.args[0] == opening else [inner]
    value = parser.expression(POWER)
    while parser.peek.kind in ("num", "sym") or parser.peek.value in ("frac", "sqrt"):
        value = product(value, parser.expression(PERCENT))
    return [value]


def argument(parser: Parser) -> Node:
    r"""One argument of a LaTeX command: a group, or a token. Of ``\frac12`` the first takes ``1``."""
    token = parser.peek
    if token.kind == "num" and len(token.value) > 1 and token.value.isdecimal():
        parser.tokens[parser.position] = Token("num", token.value[1:])
        return number(int(token.value[0]))
    return operand(parser)


def operand(parser: Parser) -> Node:
    """One operand, a numeral whole."""
    parser.descend()
    token = parser.take()
    if token.kind == "num":
        node = literals.numeral(token.value)
    elif token.kind == "sym":
        node = symbol(token.value)
    elif token == Token("op", "-"):
        node = Node("neg", (operand(parser),))
    elif token.kind in ("open", "cmd", "fn"):
        parser.position -= 1
        node = parser.prefix()
    else:
        raise Unreadable("an argument is missing")
    parser.depth -= 1
    return node


def command(parser: Parser, name: str) -> Node:
    """A LaTeX command with arguments."""
    if name == "frac":
        numerator = argument(parser)
        return Node("mul", (numerator, Node("inv", (argument(parser),))))
    if name == "binom":
        upper = argument(parser)
        return Node("binom", (upper, argument(parser)))
    if name == "sqrt":
        return _root(parser)
    if name in ("sum", "prod", "int", "lim"):
        return _big(parser, name)
    if name.startswith("begin:"):
        return _environment(parser, name.removeprefix("begin:"))
    if name in ("angle", "triangle"):
        return symbol(name)
    if name == "overline":
        return conjugated(operand(parser))
    raise Unreadable(f"the command {name}")


def conjugated(node: Node) -> Node:
    """The conjugate of a sum that holds i; a line over anything else only names it."""
    if node.head != "add" or symbol("i") not in walk(node):
        return node
    return substituted(node, "i", Node("neg", (symbol("i"),)))


def _root(parser: Parser) -> Node:
    degree = number(2)
    if parser.peek == Token("open", "["):
        parser.take()
        degree = parser.expression(0)
        if not parser.taken("close", "]"):
            raise Unreadable("the degree of a root is not closed")
    return Node("root", (operand(parser), degree))


def _big(parser: Parser, name: str) -> Node:
    """A sum, product, integral or limit with its limits and what it ranges over."""
    lower = upper = None
    while parser.peek.kind == "op" and parser.peek.value in ("^", "_"):
        if parser.take().value == "^":
            upper = operand(parser)
        elif name == "lim":
            return _limit(parser)
        else:
            lower = operand(parser)
    if name == "int":
        return _integral(parser, lower, upper)
    if lower is None or lower.head != "rel" or lower.args[0] != ("=",) or lower.args[1].head != "sym":
        raise Unreadable("a sum without an index")
    index, body = lower.args[1].args[0], parser.expression(PRODUCT)
    if index == "i":  # no imaginary unit here
        index, body = "index", substituted(body, "i", symbol("index"))
    return Node("big", (name, body, index, lower.args[2], upper))


def _limit(parser: Parser) -> Node:
    if not parser.taken("open", "{"):
        raise Unreadable("a limit without a variable")
    variable = parser.take()
    if variable.kind != "sym" or not parser.taken("op", "to"):
        raise Unreadable("a limit without a variable")
    point = parser.expression(0)
    if not parser.taken("close", "}"):
        raise Unreadable("a limit at more than a point")
    return Node("big", ("lim", parser.expression(PRODUCT), variable.value, point, None))


def _integral(parser: Parser, lower: Node | None, upper: Node | None) -> Node:
    depth = 0
    for index in range(parser.position, len(parser.tokens) - 1):
        token, following = parser.tokens[index : index + 2]
        depth += (token.kind == "open") - (token.kind == "close")
        if depth == 0 and token == Token("sym", "d", token.gap) and following.kind == "sym":
            body = parser.tokens[parser.position : index]
            parser.position = index + 2
            inner = parser.part(body) if body else number(1)
            return Node("big", ("int", inner, following.value, lower, upper))
    raise Unreadable("an integral without a variable")


def _environment(parser: Parser, name: str) -> Node:
    """The rows of a matrix, of cases or of aligned equations."""
    if name not in ENVIRONMENTS:
        raise Unreadable(f"the environment {name}")
    if name in ("array", "alignedat") and parser.taken("open", "{"):
        while not parser.taken("close", "}"):
            if parser.take().kind == "end":
                raise Unreadable("the columns of an array are not closed")
    rows = _rows(parser, name)
    if name.startswith(("align", "gather", "equation", "eqnarray", "split")):
        return rows[-1][-1] if len(rows[-1]) == 1 else Node("seq", tuple(rows[-1]))
    if name == "cases":
        return Node("seq", tuple(cell for row in rows for cell in row))
    matrix = Node("matrix", tuple(tuple(row) for row in rows))
    return Node("det", (matrix,)) if name in ("vmatrix", "Vmatrix") else matrix


def _rows(parser: Parser, name: str) -> list[list[Node]]:
    rows: list[list[Node]] = [[]]
    start, depth = parser.position, 0
    aligned = name.startswith(("align", "gather", "equation", "eqnarray", "split"))
    while True:
        token = parser.take()
        depth += token.value.startswith("begin:") - token.value.startswith("end:")
        if token.kind == "end":
            raise Unreadable("an environment is not closed")
        ends = depth < 0
        if not ends and (depth > 0 or token.value not in ("row", "&") or (aligned and token.value == "&")):
            continue
        cell = parser.tokens[start : parser.position - 1]
        cell = [each for each in cell if each != Token("op", "&", each.gap)]
        if cell:
            rows[-1].append(parser.part(cell))
        start = parser.position
        if token.value == "row" and rows[-1]:
            rows.append([])
        if ends:
            return [row for row in rows if row] or _nothing()


def _nothing() -> list[list[Node]]:
    raise Unreadable("an empty environment")
