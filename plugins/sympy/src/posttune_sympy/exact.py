"""Exact arithmetic: rational values, and fingerprints that tell expressions apart without algebra."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

from posttune_sympy.nodes import Node, Undefined, number

MAX_BITS = 20_000  # of a numerator or denominator
MAX_FACTORIAL = 1_000
MAX_EXPONENT_BITS = 256  # in a fingerprint, where powers are taken modulo PRIME

# A prime that is 1 modulo 4 and modulo every prime below 100, so that -1 and all these have square roots.
PRIME = 200843295710328300236274014352524624420976740743477007058587284028575640731801


class NotRational(Exception):
    """The value is irrational, holds a variable, or is over a limit."""


# --- rational values -----------------------------------------------------------------------------


def rational(node: Node) -> Fraction | None:
    """The rational value of an expression; None where it has none that is known or small enough.

    Raises Undefined for a division by zero.
    """
    try:
        return _rational(node)
    except NotRational:
        return None


def _rational(node: Node) -> Fraction:
    head, args = node.head, node.args
    if head == "num":
        value: Fraction = args[0]
        return value
    if head == "mod" and args[0].head == "pow":
        return _power_modulo(*(_rational(arg) for arg in (*args[0].args, args[1])))
    if head in _VALUES:
        return _bounded(_VALUES[head](*(_rational(arg) for arg in args)))
    if head == "add":
        return _bounded(sum((_rational(arg) for arg in args), Fraction(0)))
    if head == "mul":
        result = Fraction(1)
        for arg in args:
            result = _bounded(result * _rational(arg))
        return result
    if head == "unit":
        return _rational(args[0])
    if head == "fn" and args[0] in _FUNCTIONS and len(args) > 1:
        return _FUNCTIONS[args[0]]([_rational(arg) for arg in args[1:]])
    raise NotRational


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
        raise NotRational
    return value


def _inverse(value: Fraction) -> Fraction:
    if not value:
        raise Undefined
    return 1 / value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        return _power(_root(base, Fraction(exponent.denominator)), Fraction(exponent.numerator))
    if base == 0 and exponent <= 0:
        raise Undefined
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) not in (0, 1) and abs(exponent) * (size - 1) > MAX_BITS:
        raise NotRational
    if abs(base) == 1:
        return base if exponent % 2 else Fraction(1)
    return base ** int(exponent) if base else base


def _root(radicand: Fraction, degree: Fraction) -> Fraction:
    if degree.denominator != 1 or not 2 <= degree <= 64:
        raise NotRational
    sign = -1 if radicand < 0 and degree % 2 else 1
    parts = [
        _integer_root(sign * radicand.numerator, int(degree)),
        _integer_root(radicand.denominator, int(degree)),
    ]
    return sign * Fraction(parts[0], parts[1])


def _integer_root(value: int, degree: int) -> int:
    if value < 0:
        raise NotRational
    if degree == 2:
        root = math.isqrt(value)
    elif value.bit_length() > 900:
        raise NotRational
    else:
        root = round(value ** (1 / degree)) if value.bit_length() < 900 else 0
        root = next((near for near in (root - 1, root, root + 1) if near >= 0 and near**degree == value), -1)
    if root < 0 or root**degree != value:
        raise NotRational
    return root


def _factorial(value: Fraction) -> Fraction:
    if value < 0 or value.denominator != 1 or value > MAX_FACTORIAL:
        raise NotRational
    return Fraction(math.factorial(int(value)))


def _binomial(upper: Fraction, lower: Fraction) -> Fraction:
    if upper.denominator != 1 or lower.denominator != 1 or not 0 <= lower <= upper:
        raise NotRational
    if min(lower, upper - lower) * upper.numerator.bit_length() > MAX_BITS:
        raise NotRational
    return Fraction(math.comb(int(upper), int(lower)))


def _modulo(value: Fraction, divisor: Fraction) -> Fraction:
    if not divisor:
        raise Undefined
    return value % divisor


def _power_modulo(base: Fraction, exponent: Fraction, divisor: Fraction) -> Fraction:
    if not divisor:
        raise Undefined
    if exponent < 0 or any(value.denominator != 1 for value in (base, exponent, divisor)):
        raise NotRational
    return Fraction(pow(int(base), int(exponent), int(divisor)))


def _integers(values: list[Fraction]) -> list[int]:
    if any(value.denominator != 1 for value in values):
        raise NotRational
    return [int(value) for value in values]


_VALUES: dict[str, Callable[..., Fraction]] = {
    "neg": lambda value: -value,
    "inv": _inverse,
    "pow": _power,
    "root": _root,
    "abs": abs,
    "fact": _factorial,
    "binom": _binomial,
    "mod": _modulo,
    "percent": lambda value: value / 100,
    "deg": lambda value: value,
}
_FUNCTIONS: dict[str, Callable[[list[Fraction]], Fraction]] = {
    "floor": lambda values: Fraction(math.floor(values[0])),
    "ceil": lambda values: Fraction(math.ceil(values[0])),
    "gcd": lambda values: Fraction(math.gcd(*_integers(values))),
    "lcm": lambda values: _bounded(Fraction(math.lcm(*_integers(values)))),
    "max": max,
    "min": min,
}


# --- fingerprints --------------------------------------------------------------------------------


def fingerprint(node: Node, seed: int = 0) -> tuple[int, bool]:
    """The value modulo ``PRIME`` with pseudo-random values for the variables; and whether it is complete.

    Equal fingerprints mean equal expressions, up to chance of 2^-256. Different ones mean different
    expressions where both are complete: rational functions of variables, pi, i and square roots. What
    else there is (logarithms, other roots) is taken as a variable of its own and makes it incomplete.
    Raises Undefined where the expression has no value.
    """
    reader = _Fingerprint(seed)
    return reader.of(node), reader.complete


class _Fingerprint:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.complete = True

    def of(self, node: Node) -> int:
        head, args = node.head, node.args
        if head == "num":
            return _residue(args[0])
        if head == "add":
            return sum(self.of(arg) for arg in args) % PRIME
        if head == "mul":
            result = 1
            for arg in args:
                result = result * self.of(arg) % PRIME
            return result
        if head == "neg":
            return -self.of(args[0]) % PRIME
        if head in ("deg", "unit"):
            return self.of(args[0])
        if head == "percent":
            return self.of(args[0]) * pow(100, -1, PRIME) % PRIME
        if head == "inv":
            return _inverted(self.of(args[0]))
        if head == "sym":
            return _unit_root() if args[0] == "i" else self.drawn("sym", args[0])
        if head == "pow":
            return self.power(args[0], args[1])
        if head == "root":
            return self.root(args[0], args[1])
        return self.other(node)

    def power(self, base: Node, exponent: Node) -> int:
        value = rational(exponent)
        if value is None:
            return self.opaque("pow", self.of(base), self.of(exponent))
        if value.denominator != 1:
            return pow(self.root(base, number(value.denominator)), value.numerator, PRIME)
        if value.numerator.bit_length() > MAX_EXPONENT_BITS:
            return self.opaque("pow", self.of(base), value)
        found = self.of(base)
        if value < 0:
            found = _inverted(found)
        if found == 0 and value == 0:
            raise Undefined
        return pow(found, abs(int(value)), PRIME)

    def root(self, radicand: Node, degree: Node) -> int:
        value, power = rational(radicand), rational(degree)
        if value is None or power is None:
            return self.opaque("pow", self.of(radicand), _inverted(self.of(degree)))
        exact = rational(Node("root", (radicand, degree)))
        if exact is not None:
            return _residue(exact)
        if power != 2:
            return self.opaque("pow", _residue(value), _residue(1 / power) if power else 0)
        return self.square_root(value)

    def square_root(self, value: Fraction) -> int:
        """Of a rational: a product of the roots of small primes, and what is left over."""
        rest = abs(value.numerator) * value.denominator
        result = pow(value.denominator, -1, PRIME) * (_unit_root() if value < 0 else 1)
        for prime in _small_primes():
            while rest % prime == 0:
                rest //= prime
                result = result * prime_root(prime) % PRIME
        whole = math.isqrt(rest)
        if whole * whole == rest:
            return result * whole % PRIME
        return result * self.opaque("pow", rest, _residue(Fraction(1, 2))) % PRIME

    def other(self, node: Node) -> int:
        head, args = node.head, node.args
        if head == "fn" and args[0] in _QUOTIENTS and len(args) == 2:
            upper, lower = (
                self.opaque("fn", name, self.of(args[1])) if name else 1 for name in _QUOTIENTS[args[0]]
            )
            return upper * _inverted(lower) % PRIME
        exact = rational(node)
        if exact is not None:
            return _residue(exact)
        if head == "fact":
            return self.factorial(args[0])
        if head == "binom" and (chosen := rational(args[1])) is not None and chosen in _SHIFTS:
            return (
                self.product_below(self.of(args[0]), int(chosen))
                * _inverted(math.factorial(int(chosen)))
                % PRIME
            )
        parts = [self.of(arg) if isinstance(arg, Node) else arg for arg in args]
        return self.opaque(head, *parts)

    def factorial(self, node: Node) -> int:
        """``(n + 2)!`` as ``(n + 2)(n + 1) n!``."""
        terms = [rational(term) for term in node.args] if node.head == "add" else []
        shift = sum((term for term in terms if term is not None), Fraction(0))
        if abs(shift) not in _SHIFTS:
            shift = Fraction(0)
        value = self.of(node)
        base = (value - _residue(shift)) % PRIME
        found = self.opaque("fact", base)
        if shift < 0:
            return found * _inverted(self.product_below(base, int(-shift))) % PRIME
        return found * self.product_below(value, int(shift)) % PRIME

    def product_below(self, start: int, count: int) -> int:
        """``start (start - 1) ...``, so many factors."""
        return math.prod((start - place) % PRIME for place in range(count)) % PRIME

    def opaque(self, *key: object) -> int:
        """A variable of its own for what has no arithmetic here."""
        self.complete = False
        return self.drawn(*key)

    def drawn(self, *key: object) -> int:
        digest = hashlib.blake2b(repr((self.seed, *key)).encode("utf-8", "replace"), digest_size=40)
        return int.from_bytes(digest.digest(), "big") % PRIME


_SHIFTS = range(1, 21)

# tan x = sin x / cos x, sec x = 1 / cos x
_QUOTIENTS = {"tan": ("sin", "cos"), "cot": ("cos", "sin"), "sec": ("", "cos"), "csc": ("", "sin")}


def _residue(value: Fraction) -> int:
    return value.numerator * _inverted(value.denominator % PRIME) % PRIME


def _inverted(value: int) -> int:
    if value % PRIME == 0:
        raise Undefined
    return pow(value, -1, PRIME)


@lru_cache(maxsize=1)
def _small_primes() -> tuple[int, ...]:
    return tuple(n for n in range(2, 100) if all(n % k for k in range(2, math.isqrt(n) + 1)))


@lru_cache(maxsize=1)
def _unit_root() -> int:
    return prime_root(PRIME - 1)


@lru_cache(maxsize=64)
def prime_root(value: int) -> int:
    """A square root modulo ``PRIME`` (Tonelli and Shanks); ``value`` must have one."""
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    other = next(n for n in range(2, 10_000) if pow(n, (PRIME - 1) // 2, PRIME) == PRIME - 1)
    factor, rest, root = pow(other, odd, PRIME), pow(value, odd, PRIME), pow(value, (odd + 1) // 2, PRIME)
    while rest != 1:
        power, square = 0, rest
        while square != 1:
            power, square = power + 1, square * square % PRIME
        step = pow(factor, 1 << (twos - power - 1), PRIME)
        twos, factor = power, step * step % PRIME
        rest, root = rest * factor % PRIME, root * step % PRIME
    return root
