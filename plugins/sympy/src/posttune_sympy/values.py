"""Whether two expressions are equal: exactly where possible, else by SymPy in a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from posttune_sympy.approximate import POINTS, Unknown, Value, approximate, assigned, differ
from posttune_sympy.exact import PRIME, fingerprint, rational
from posttune_sympy.nodes import Node, Undefined, number, product, symbol, variables, walk
from posttune_sympy.options import MathOptions
from posttune_sympy.quantities import unit

Ask = Callable[..., bool | None]
"""Asks SymPy: an operation and its nodes; None where it does not know, or took too long."""

FLOAT_DIGITS = 10  # a decimal with so many digits may be off in the last few, as floats print


@dataclass(frozen=True)
class Values:
    """Compares expressions under the options."""

    options: MathOptions
    ask: Ask

    def same(self, left: Node, right: Node) -> bool:
        """Whether two answers mean the same value, units and percent signs judged by the options."""
        left, left_mark = peeled(left)
        right, right_mark = peeled(right)
        sizes = unit(left_mark.unit), unit(right_mark.unit)
        if sizes[0] and sizes[1] and sizes[0].dimension == sizes[1].dimension:
            return self.equal(product(left, number(sizes[0].size)), product(right, number(sizes[1].size)))
        units = {mark.unit.replace(" ", "").removesuffix("s") for mark in (left_mark, right_mark)} - {""}
        if self.options.units == "match" and len(units) > 1:
            return False
        if left_mark.percent != right_mark.percent:
            return self._percent(left, left_mark.percent, right)
        if left_mark.degree != right_mark.degree and self._radians(left, left_mark.degree, right):
            return True
        return self.equal(left, right)

    def _percent(self, left: Node, left_is: bool, right: Node) -> bool:
        share, plain = (left, right) if left_is else (right, left)
        # A rounded decimal is compared as it is written: 66.67 % is two thirds.
        pair = (
            (share, product(plain, number(100)))
            if _decimals(share)[1]
            else (product(share, number(Fraction(1, 100))), plain)
        )
        if self.options.percent != "number" and self.equal(*(pair if left_is else reversed(pair))):
            return True
        return self.options.percent != "fraction" and self.equal(left, right)

    def _radians(self, left: Node, left_is: bool, right: Node) -> bool:
        turn = Node("mul", (symbol("pi"), number(Fraction(1, 180))))
        pair = (product(left, turn), right) if left_is else (left, product(right, turn))
        return self.equal(*pair)

    def equal(self, left: Node, right: Node) -> bool:
        """Whether two expressions are equal. One without a value (0/0) equals nothing."""
        try:
            return self._equal(left, right)
        except Undefined:
            return False

    def _equal(self, left: Node, right: Node) -> bool:
        values = rational(left), rational(right)
        if None not in values:
            return values[0] == values[1] or self._close(left, right)
        prints = fingerprint(left), fingerprint(right)
        if prints[0][0] == prints[1][0]:
            return not self._refuted(left, right, 0)
        constant = not (variables(left) or variables(right))
        if all(complete for _, complete in prints):
            return constant and self._close(left, right)
        if constant and self._close(left, right):
            return True
        return self._numerically(left, right)

    def _numerically(self, left: Node, right: Node) -> bool:
        """Refuted by floats at a few points, or settled by SymPy."""
        names = variables(left) | variables(right)
        if any(self._refuted(left, right, point) for point in range(len(POINTS) if names else 1)):
            return False
        return self.ask("equal", left, right) is True

    def _refuted(self, left: Node, right: Node, point: int) -> bool:
        """Whether floats at a point show a difference."""
        at = assigned(variables(left) | variables(right), point)
        try:
            values = approximate(left, at), approximate(right, at)
        except Unknown:
            return False
        if point == len(POINTS) - 1 and any(value.at.imag for value in values):
            return False  # logarithms and roots of negative numbers: another branch is no difference
        return differ(*values)

    def proportional(self, left: Node, right: Node) -> float | None:
        """The constant k with ``left = k * right``; None where there is none, or none is found.

        Only the sign of k has a meaning; where it cannot be told k is 0.
        """
        try:
            pairs = [(fingerprint(left, seed)[0], fingerprint(right, seed)[0]) for seed in range(3)]
        except Undefined:
            return None
        first, second = pairs[0]
        if not (first and second) or any((a * second - first * b) % PRIME for a, b in pairs):
            return None
        return self._sign(left, right)

    def _sign(self, left: Node, right: Node) -> float:
        names = variables(left) | variables(right)
        for point in range(len(POINTS)):
            at = assigned(names, point)
            try:
                upper, lower = approximate(left, at), approximate(right, at)
            except Unknown:
                continue
            if abs(lower.at) > 100 * lower.error and abs(upper.at) > 100 * upper.error:
                return (upper.at / lower.at).real
        return 0.0

    def less(self, left: Node, right: Node) -> bool | None:
        """Whether one real constant is smaller; None where that cannot be told."""
        try:
            values = rational(left), rational(right)
            if values[0] is not None and values[1] is not None:
                return values[0] < values[1]
            floats = self._real(left), self._real(right)
        except (Unknown, Undefined):
            return None
        return floats[0].at.real < floats[1].at.real if differ(*floats) else None

    def _real(self, node: Node) -> Value:
        value = approximate(node, {})
        if abs(value.at.imag) > value.error:
            raise Unknown
        return value

    # --- decimals ------------------------------------------------------------------------------

    def _close(self, left: Node, right: Node) -> bool:
        """Whether one is the other rounded, or within the tolerance."""
        try:
            values = approximate(left, {}), approximate(right, {})
        except Unknown:
            return False
        gap = abs(values[0].at - values[1].at)
        if self.options.tolerance and gap <= self.options.tolerance * abs(values[0].at):
            return True
        for literal, other in ((left, right), (right, left)):
            digits, places = _decimals(literal)
            wanted = self.options.rounding_digits
            if not places or not wanted or digits < wanted or 0 < _decimals(other)[1] <= places:
                continue
            allowed = 10.0**-places
            if digits >= FLOAT_DIGITS:
                allowed = max(allowed, 1e-9 * abs(values[0].at))
            if gap < allowed * (1 - 1e-9):
                return True
        return False


@dataclass(frozen=True)
class Mark:
    """What stands around a value."""

    unit: str = ""
    percent: bool = False
    degree: bool = False


def peeled(node: Node) -> tuple[Node, Mark]:
    """A value without its unit, percent and degree signs, and what they were."""
    unit, percent, degree, negative = "", False, False, False
    while True:
        if node.head == "unit":
            unit, node = node.args[1], node.args[0]
        elif node.head == "neg" and any(each.head in ("unit", "percent", "deg") for each in walk(node)):
            if node.args[0].head not in ("unit", "percent", "deg"):
                break
            negative, node = not negative, node.args[0]
        elif node.head == "percent":
            percent, node = True, node.args[0]
        elif node.head == "deg":
            degree, node = True, node.args[0]
        else:
            break
    degree = degree or unit.startswith("degree")
    return (Node("neg", (node,)) if negative else node), Mark(unit, percent, degree)


def _decimals(node: Node) -> tuple[int, int]:
    """Significant digits, and places behind the point, of a decimal literal; zeros for all else."""
    if node.head == "neg":
        return _decimals(node.args[0])
    scale = 0
    if node.head == "mul" and len(node.args) == 2 and node.args[1].head == "pow":
        base, power = (rational(arg) for arg in node.args[1].args)
        if base != 10 or power is None or power.denominator != 1:
            return 0, 0
        node, scale = node.args[0], int(power)
    if node.head != "num" or not node.args[1]:
        return 0, 0
    places = node.args[1] - scale
    return len(str(abs(node.args[0].numerator * 10 ** node.args[1] // node.args[0].denominator))), places
