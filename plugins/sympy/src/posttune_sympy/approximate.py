"""Floating-point values with a bound on their error: enough to tell that two expressions differ."""

from __future__ import annotations

import cmath
import math
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

from posttune_sympy.nodes import Node, Undefined

EPSILON = 4 * sys.float_info.epsilon
LARGEST = 1e290


class Unknown(Exception):
    """No value here: out of range, or a function that this module does not know."""


class Value(NamedTuple):
    """A complex number and how far it may be off."""

    at: complex
    error: float


# Points for the variables: positive ones, then negative ones.
POINTS = (
    (0.7320508, 1.2360679, 0.4142135, 1.6457513, 2.2182818, 0.5772156),
    (1.8392867, 0.3247179, 2.6457513, 0.9159655, 1.3063778, 0.2614972),
    (-0.8346268, -1.3247179, -0.6180339, -1.7320508, -0.3819660, -1.4513692),
)


def assigned(names: frozenset[str], point: int) -> dict[str, float]:
    """A value for every variable."""
    values = POINTS[point]
    return {name: values[i % len(values)] + i // len(values) for i, name in enumerate(sorted(names))}


def approximate(node: Node, variables: Mapping[str, float]) -> Value:
    """The value of an expression. Raises Unknown and Undefined."""
    try:
        value = _value(node, variables)
    except (OverflowError, ZeroDivisionError, ValueError) as error:
        raise Unknown from error
    if not (abs(value.at) < LARGEST and value.error < LARGEST):  # NaN fails too
        raise Unknown
    return value


def differ(left: Value, right: Value) -> bool:
    """Whether the two are certainly different."""
    return abs(left.at - right.at) > 16 * (left.error + right.error) + 1e-300


def _value(node: Node, at: Mapping[str, float]) -> Value:
    head, args = node.head, node.args
    if head == "num":
        number = float(args[0])
        return Value(complex(number), abs(number) * EPSILON)
    if head == "sym":
        return _symbol(args[0], at)
    if head == "add":
        parts = [_value(arg, at) for arg in args]
        total = sum(part.at for part in parts)
        return Value(total, sum(part.error + abs(part.at) * EPSILON for part in parts))
    if head == "mul":
        result = _value(args[0], at)
        for arg in args[1:]:
            result = _times(result, _value(arg, at))
        return result
    if head == "neg":
        inner = _value(args[0], at)
        return Value(0 - inner.at, inner.error)
    if head in ("deg", "unit"):
        return _value(args[0], at)
    if head == "percent":
        inner = _value(args[0], at)
        return Value(inner.at / 100, inner.error / 100)
    if head == "inv":
        return _inverse(_value(args[0], at))
    if head == "pow":
        return _power(_value(args[0], at), _value(args[1], at))
    if head == "root":
        return _root(_value(args[0], at), _value(args[1], at))
    if head == "abs":
        inner = _value(args[0], at)
        return Value(complex(abs(inner.at)), inner.error + abs(inner.at) * EPSILON)
    if head == "fn" and len(args) == 2 and args[0] in _FUNCTIONS:
        return _applied(args[0], _value(args[1], at))
    if head == "fact":
        return _factorial(_value(args[0], at))
    raise Unknown


def _symbol(name: str, at: Mapping[str, float]) -> Value:
    if name in _CONSTANTS:
        return Value(_CONSTANTS[name], EPSILON)
    if name not in at:
        raise Unknown
    return Value(complex(at[name]), 0.0)


_CONSTANTS = {"pi": complex(math.pi), "e": complex(math.e), "i": 1j}


def _times(left: Value, right: Value) -> Value:
    at = left.at * right.at
    error = abs(left.at) * right.error + abs(right.at) * left.error + left.error * right.error
    return Value(at, error + abs(at) * EPSILON)


def _inverse(value: Value) -> Value:
    size = abs(value.at)
    if size <= 2 * value.error:
        raise Unknown  # perhaps a division by zero
    return Value(1 / value.at, value.error / (size * (size - value.error)) + EPSILON / size)


def _power(base: Value, exponent: Value) -> Value:
    if exponent.at == 0 and exponent.error == 0:
        return Value(1 + 0j, 0.0)
    if abs(base.at) <= base.error:
        if exponent.at.real > 0 and base.error == 0:
            return Value(0j, 0.0)
        raise Unknown
    if base.at.imag == 0:
        base = Value(complex(base.at.real, 0.0), base.error)  # -0.0 would be below the cut
    if base.at.imag == 0 and base.at.real < 0 and exponent.at.imag == 0:
        sign = _odd_root_sign(exponent.at.real)
        if sign:
            positive = _power(Value(-base.at, base.error), exponent)
            return Value(sign * positive.at, positive.error)
    at = base.at**exponent.at
    relative = abs(exponent.at) * base.error / abs(base.at) + abs(cmath.log(base.at)) * exponent.error
    scale = 1 + abs(exponent.at * cmath.log(base.at))
    return Value(at, abs(at) * (2 * relative + scale * EPSILON))


def _odd_root_sign(exponent: float) -> int:
    """The sign of (-1)^(p/q) with an odd q, as schools have it: (-8)^(1/3) is -2. 0 where q is even."""
    for q in (1, 3, 5, 7, 9):
        p = round(exponent * q)
        if abs(exponent * q - p) < 1e-9:
            return -1 if p % 2 else 1
    return 0


def _root(radicand: Value, degree: Value) -> Value:
    if abs(radicand.at) <= radicand.error and radicand.error > 0:
        # The root of nearly nothing: between 0 and the root of the error.
        return Value(0j, float(abs(radicand.at) + radicand.error) ** (1 / max(degree.at.real, 1)))
    return _power(radicand, _inverse(degree))


def _factorial(value: Value) -> Value:
    if value.at.imag or value.at.real < 0 or value.at.real > 170:
        raise Unknown
    at = math.gamma(value.at.real + 1)
    return Value(complex(at), at * (EPSILON * 64 + value.error * 8))


def _log(value: complex) -> complex:
    if value == 0:
        raise Undefined
    return cmath.log(complex(value.real, value.imag + 0.0))


# Name: the function, and the size of its derivative.
_FUNCTIONS: dict[str, tuple[Callable[[complex], complex], Callable[[complex], float]]] = {
    "sin": (cmath.sin, lambda z: abs(cmath.cos(z))),
    "cos": (cmath.cos, lambda z: abs(cmath.sin(z))),
    "tan": (cmath.tan, lambda z: 1 / abs(cmath.cos(z)) ** 2),
    "cot": (lambda z: 1 / cmath.tan(z), lambda z: 1 / abs(cmath.sin(z)) ** 2),
    "sec": (lambda z: 1 / cmath.cos(z), lambda z: 1 / abs(cmath.cos(z)) ** 2),
    "csc": (lambda z: 1 / cmath.sin(z), lambda z: 1 / abs(cmath.sin(z)) ** 2),
    "arcsin": (cmath.asin, lambda z: 1 / abs(cmath.sqrt(1 - z * z))),
    "arccos": (cmath.acos, lambda z: 1 / abs(cmath.sqrt(1 - z * z))),
    "arctan": (cmath.atan, lambda z: 1 / abs(1 + z * z)),
    "sinh": (cmath.sinh, lambda z: abs(cmath.cosh(z))),
    "cosh": (cmath.cosh, lambda z: abs(cmath.sinh(z))),
    "tanh": (cmath.tanh, lambda z: 1 / abs(cmath.cosh(z)) ** 2),
    "log": (_log, lambda z: 1 / abs(z)),
}


def _applied(name: str, argument: Value) -> Value:
    function, slope = _FUNCTIONS[name]
    at = function(argument.at)
    # The slope may grow within the error: 4 leaves room. A pole nearby shows as a large value.
    error = 4 * slope(argument.at) * (argument.error + abs(argument.at) * EPSILON) + abs(at) * EPSILON
    return Value(at, error)
