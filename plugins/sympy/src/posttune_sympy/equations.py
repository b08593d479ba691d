"""What equations state: a value of a name, or a curve."""

from __future__ import annotations

from posttune_sympy.exact import rational
from posttune_sympy.nodes import CONSTANTS, Node, symbol, variables, walk
from posttune_sympy.sets import FLIPPED, ORDERED
from posttune_sympy.structures import COLLECTIONS

_NAMES = frozenset({"sym", "mul", "inv", "abs", "ratio", "group", "fn", "unit", "add", "neg"})


def assigns(node: Node) -> bool:
    return node.head == "rel" and set(node.args[0]) <= {"=", "~"}


def is_name(node: Node) -> bool:
    """Whether it only names a quantity: x, f(2), AB, angle ABC, |AB|, (x, y), cos A, x + y, a^2 + b^2."""
    if node.head == "fn" and len(node.args[0]) <= 2:
        return True
    if node.head == "pow":
        return is_name(node.args[0]) and rational(node.args[1]) is not None
    if node.head == "mul" and node.args[0].head == "sym" and not any(map(variables, node.args[1:])):
        return True  # P(3)
    return node.head in _NAMES and all(is_name(child) for child in node.children) and node not in _NUMBERS


_NUMBERS = frozenset(symbol(name) for name in CONSTANTS)


def states(node: Node, sums: bool = True) -> bool:
    """Whether an equation states a value (``x = 5``, ``2 + 3 = 5``), as against ``2 x + y = 5``.

    ``x^2 + y^2 = 5`` does with ``sums``: as an answer; as a reference it may be a circle.
    """
    value = assigned_value(node)
    others = [side for side in node.args[1:] if side is not value]
    named = value.head not in (*COLLECTIONS, "matrix")
    if any(side.head in ("add", "pow") and variables(side) for side in others) and (
        named and (not sums or rational(value) == 0)
    ):
        return False
    return any(is_name(side) or not _free(side) for side in others)


def _free(node: Node) -> bool:
    return bool(variables(node)) and node.head != "big"


def assigned_value(node: Node) -> Node:
    """What ``x = a = b`` states: the last exact side that is not a name."""
    sides: list[Node] = list(node.args[1:])
    for index, operator in enumerate(node.args[0]):
        if operator == "~" and not all(is_name(side) for side in sides[: index + 1]):
            sides = sides[: index + 1]
            break
    value = sides[-1]
    if len(sides) > 1 and is_name(value) and not is_name(sides[0]) and not variables(sides[0]):
        return sides[0]
    return value


def named_side(node: Node) -> Node | None:
    """The name in ``name = value``."""
    sides = node.args[1:]
    value = assigned_value(node)
    return next((side for side in (sides[0], sides[-1]) if side is not value and is_name(side)), None)


def compatible(first: Node | None, second: Node | None, value: Node) -> bool:
    """x = 2 is not y = 2, nor cos A = 1 sin A = 1; but f(x) = 2 x may be y = 2 x, and |AB| = 1 AB = 1.

    What is computed of names is no name: x + y = 5 is neither x - y = 5 nor z = 5.
    """
    if first is None or second is None or first == second:
        return True
    if not (_plain_name(first) and _plain_name(second)):
        return False
    if first.head == second.head == "fn" and first.args[0].count("'") != second.args[0].count("'"):
        return False
    if first.head != second.head:
        return True
    return bool(variables(value)) or first.head not in ("sym", "fn")


def _plain_name(node: Node) -> bool:
    """A name, or several side by side (AB, angle ABC): no sum, power, or product of variables."""
    if any(each.head in ("add", "neg", "pow", "inv") for each in walk(node)):
        return False
    letters = [each.args[0] for each in walk(node) if each.head == "sym"]
    return node.head not in ("mul", "abs") or not any(len(each) == 1 and each.islower() for each in letters)


def difference(node: Node) -> Node | None:
    left, right = node.args[1:3]
    if any(each.head in (*COLLECTIONS, "matrix", "ratio") for side in (left, right) for each in walk(side)):
        return None
    return Node("add", (left, Node("neg", (right,))))


def turned(node: Node) -> Node:
    """``a < b`` as ``b > a``."""
    operators, *sides = node.args
    if not set(operators) <= ORDERED:
        return node
    return Node("rel", (tuple(FLIPPED[each] for each in reversed(operators)), *reversed(sides)))
