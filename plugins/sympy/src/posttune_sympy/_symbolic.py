"""What the workers compute: trees of answers as SymPy objects, and whether two of them are equal.

SymPy's parsers are not used: objects are built from the tree by the table below.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import sympy  # type: ignore[import-untyped]
from sympy import Rational, Symbol
from sympy.core.expr import Expr  # type: ignore[import-untyped]

from posttune_sympy.nodes import Node, from_json

MAX_EXPONENT = 100_000
RECURSION = 4_000
MAX_FACTORIAL = 5_000
DIGITS = 40
ZERO = sympy.Float(10) ** -25
# Points for the variables; only what is real at a negative point counts there.
POINTS = (
    ("7/5", "17/11", "23/13", "5/7", "13/17", "29/19"),
    ("11/3", "2/9", "31/8", "19/21", "37/41", "8/15"),
    ("1/3", "41/9", "4/27", "53/12", "9/35", "3/2"),
    ("-6/7", "-13/9", "-5/8", "-22/13", "-3/10", "-17/12"),
)


class Unsupported(Exception):
    """The tree holds what has no SymPy object here, or one over a limit."""


def answer(request: dict[str, Any]) -> bool | None:
    """The answer to a request: true, false, or null where it is not known."""
    sys.setrecursionlimit(RECURSION)
    nodes = [from_json(node) for node in request["nodes"]]
    try:
        return OPERATIONS[request["operation"]](*nodes)
    except (Unsupported, ArithmeticError, ValueError, TypeError, NotImplementedError, AttributeError):
        return None
    except (LookupError, RecursionError, MemoryError, sympy.SympifyError, sympy.PolynomialError):
        return None


# --- operations ----------------------------------------------------------------------------------


def equal(left: Node, right: Node) -> bool | None:
    """Whether two expressions are equal, to 25 digits at every point."""
    first, second = built(left), built(right)
    difference = first - second
    if difference == 0:
        return True
    names = sorted(difference.free_symbols, key=str)
    if not names:
        return _is_zero(difference)
    verdicts = [_zero_at(first, second, difference, names, index) for index in range(len(POINTS))]
    if False in verdicts:
        return False
    return True if verdicts.count(True) >= 2 else None


def _zero_at(first: Expr, second: Expr, difference: Expr, names: list[Symbol], index: int) -> bool | None:
    values = POINTS[index]
    at = {name: Rational(values[i % len(values)]) + i // len(values) for i, name in enumerate(names)}
    if index == len(POINTS) - 1:
        sides = [side.subs(at).evalf(DIGITS) for side in (first, second)]
        if not all(side.is_Float or side.is_Rational for side in sides):
            return None
    return _is_zero(difference.subs(at))


def _is_zero(value: Expr) -> bool | None:
    if value.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan):
        return None
    number = value.doit().evalf(DIGITS, maxn=400)
    if not number.is_number or number.has(sympy.nan, sympy.zoo, sympy.oo):
        return None
    return bool(sympy.Abs(number).evalf(15) < ZERO)


def equations(left: Node, right: Node) -> bool | None:
    """Whether ``left = 0`` and ``right = 0`` are the same equation, denominators multiplied out."""
    first, second = (_numerator(built(node)) for node in (left, right))
    if first == 0 or second == 0:
        return bool(first == second)
    ratio = sympy.cancel(first / second)
    return bool(not ratio.free_symbols)


def _numerator(expression: Expr) -> Expr:
    numerator, _ = sympy.fraction(sympy.together(expression))
    return sympy.expand(numerator)


def sets(left: Node, right: Node) -> bool | None:
    """Whether two sets of real numbers are the same."""
    difference = sympy.SymmetricDifference(_set(left), _set(right))
    return {True: True, False: False}.get(difference.doit().is_empty)


OPERATIONS: dict[str, Callable[[Node, Node], bool | None]] = {
    "equal": equal,
    "equations": equations,
    "sets": sets,
}


# --- sets ----------------------------------------------------------------------------------------


def _set(node: Node) -> sympy.Set:
    head, args = node.head, node.args
    if head == "sym" and args[0] in ("R", "emptyset"):
        return sympy.S.Reals if args[0] == "R" else sympy.S.EmptySet
    if head in ("union", "inter", "minus"):
        parts = [_set(arg) for arg in args]
        kinds = {"union": sympy.Union, "inter": sympy.Intersection, "minus": sympy.Complement}
        return kinds[head](*parts)
    if head == "seq":
        return sympy.Union(*(_set(arg) for arg in args))
    if head == "group":
        opening, closing, *items = args
        values = [built(item) for item in items]
        if opening in (r"\{", "{"):
            return sympy.FiniteSet(*values)
        if len(values) != 2 or values[0] == values[1]:
            raise Unsupported
        return sympy.Interval(*values, left_open=opening == "(", right_open=closing == ")")
    if head == "rel":
        return _solutions(node)
    raise Unsupported


def _solutions(node: Node) -> sympy.Set:
    operators, *sides = node.args
    if operators == ("in",):
        return _set(sides[1])
    values = [built(side, real=True) for side in sides]
    names = set().union(*(value.free_symbols for value in values))
    if len(names) != 1:
        raise Unsupported
    (name,) = names
    relations = [_RELATIONS[operators[i]](values[i], values[i + 1]) for i in range(len(operators))]
    parts = [sympy.solveset(relation, name, sympy.S.Reals) for relation in relations]
    return sympy.Intersection(*parts)


_RELATIONS: dict[str, Callable[[Expr, Expr], Any]] = {
    "<": sympy.Lt,
    ">": sympy.Gt,
    "<=": sympy.Le,
    ">=": sympy.Ge,
    "=": sympy.Eq,
    "!=": sympy.Ne,
}


# --- expressions ---------------------------------------------------------------------------------


def built(node: Node, real: bool = False) -> Expr:
    """The SymPy expression of a tree. Raises Unsupported."""
    head, args = node.head, node.args
    if head == "num":
        value: Fraction = args[0]
        return Rational(value.numerator, value.denominator)
    if head == "sym":
        return _CONSTANTS.get(args[0]) or Symbol(args[0], real=True if real else None)
    if head == "fn":
        return _function(args[0], [built(arg, real) for arg in args[1:]])
    if head == "big":
        return _big(node)
    if head == "det":
        rows = args[0].args
        return sympy.Matrix([[built(entry, real) for entry in row] for row in rows]).det()
    if head == "unit":
        return built(args[0], real)
    if head not in _HEADS:
        raise Unsupported
    return _HEADS[head](*(built(arg, real) for arg in args))


_CONSTANTS = {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "oo": sympy.oo}


def _power(base: Expr, exponent: Expr) -> Expr:
    if exponent.is_Integer and abs(int(exponent)) > 1 and base.is_number:
        size = max(abs(base.p), abs(base.q)).bit_length() if base.is_Rational else 64
        if abs(int(exponent)) * size > MAX_EXPONENT:
            raise Unsupported
    if (
        exponent.is_number
        and not exponent.is_Rational
        and base.is_Integer
        and abs(exponent.evalf(15)) > MAX_EXPONENT
    ):
        raise Unsupported
    if base.is_negative and exponent.is_Rational and exponent.q % 2 == 1:
        return (-1) ** (int(exponent.p) % 2) * (-base) ** exponent
    return base**exponent


def _root(radicand: Expr, degree: Expr) -> Expr:
    return _power(radicand, 1 / degree)


def _factorial(value: Expr) -> Expr:
    if value.is_number and not value <= MAX_FACTORIAL:
        raise Unsupported
    return sympy.factorial(value)


def _binomial(upper: Expr, lower: Expr) -> Expr:
    if any(value.is_number and not abs(value) <= MAX_FACTORIAL for value in (upper, lower)):
        raise Unsupported
    return sympy.binomial(upper, lower)


_HEADS: dict[str, Callable[..., Expr]] = {
    "add": lambda *terms: sympy.Add(*terms),
    "mul": lambda *factors: sympy.Mul(*factors),
    "neg": lambda value: -value,
    "inv": lambda value: 1 / value,
    "pow": _power,
    "root": _root,
    "abs": sympy.Abs,
    "fact": _factorial,
    "binom": _binomial,
    "mod": sympy.Mod,
    "percent": lambda value: value / 100,
    "deg": lambda value: value,
}


def _function(name: str, values: list[Expr]) -> Expr:
    known = _FUNCTIONS.get(name)
    if known is None:
        return sympy.Function(name)(*values)
    return known(*values)


_FUNCTIONS: dict[str, Callable[..., Expr]] = {
    "sin": sympy.sin,
    "cos": sympy.cos,
    "tan": sympy.tan,
    "cot": sympy.cot,
    "sec": sympy.sec,
    "csc": sympy.csc,
    "sinh": sympy.sinh,
    "cosh": sympy.cosh,
    "tanh": sympy.tanh,
    "coth": sympy.coth,
    "log": sympy.log,
    "floor": sympy.floor,
    "gcd": sympy.gcd,
    "lcm": sympy.lcm,
    "arcsin": sympy.asin,
    "arccos": sympy.acos,
    "arctan": sympy.atan,
    "arccot": sympy.acot,
    "ceil": sympy.ceiling,
    "max": sympy.Max,
    "min": sympy.Min,
}


def _big(node: Node) -> Expr:
    """A sum, product, integral or limit, evaluated; this is what may take for ever."""
    kind, body, name, low, high = node.args
    variable, inner = Symbol(name), built(body)
    if kind == "lim":
        return sympy.limit(inner, variable, built(low))
    if kind == "int" and low is None:
        return sympy.integrate(inner, variable)
    if low is None or high is None:
        raise Unsupported
    limits = (variable, built(low), built(high))
    if kind == "int":
        return sympy.Integral(inner, limits).doit()
    return (sympy.Sum if kind == "sum" else sympy.Product)(inner, limits).doit()
