"""What an answer is read into: a tree of plain values that can be hashed, cached and sent as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any


class Unreadable(Exception):
    """The text is no answer in the grammar, or over one of its limits."""


class Undefined(Exception):
    """The expression has no value: 0/0, log 0."""


@dataclass(frozen=True, slots=True)
class Node:
    """A head and its arguments: nodes, or the plain values of a leaf.

    Expressions: ``num`` (Fraction, decimal places), ``sym`` (name), ``add``, ``mul``, ``inv``, ``pow``,
    ``neg``, ``pm``, ``mp``, ``root`` (radicand, degree), ``abs``, ``fact``, ``binom``, ``mod``,
    ``percent``, ``deg``, ``unit`` (value, name), ``modulo`` (value, modulus), ``fn`` (name, arguments),
    ``big`` (operator, body, variable, limits), ``det``.
    Structures: ``seq`` (comma list), ``rows`` (list of lists), ``group`` (brackets, items), ``union``,
    ``inter``, ``minus``, ``rel`` (operators, sides), ``ratio``, ``matrix`` (rows), ``base`` (digits, base),
    ``time`` (seconds), ``date`` (month, day, year or None).
    """

    head: str
    args: tuple[Any, ...]

    @property
    def children(self) -> Iterator[Node]:
        """The arguments that are nodes, those inside rows too."""
        for arg in self.args:
            if isinstance(arg, Node):
                yield arg
            elif isinstance(arg, tuple):
                yield from (item for item in arg if isinstance(item, Node))

    def replaced(self, children: Iterator[Node]) -> Node:
        """The same node with other children, taken in order."""
        args: list[Any] = []
        for arg in self.args:
            if isinstance(arg, Node):
                args.append(next(children))
            elif isinstance(arg, tuple):
                args.append(tuple(next(children) if isinstance(item, Node) else item for item in arg))
            else:
                args.append(arg)
        return Node(self.head, tuple(args))


def number(value: int | Fraction, places: int = 0) -> Node:
    """A numeral; ``places`` counts the digits behind its decimal point."""
    return Node("num", (Fraction(value), places))


def symbol(name: str) -> Node:
    """A variable or a named constant: ``pi``, ``e``, ``i``, ``oo`` (infinity)."""
    return Node("sym", (name,))


def product(left: Node, right: Node) -> Node:
    """``left * right``, flat."""
    factors = left.args if left.head == "mul" else (left,)
    return Node("mul", (*factors, right))


def walk(node: Node) -> Iterator[Node]:
    """The node and all below it."""
    yield node
    for child in node.children:
        yield from walk(child)


CONSTANTS = frozenset({"pi", "e", "i", "oo"})


def variables(node: Node) -> frozenset[str]:
    """Names of the free symbols."""
    return frozenset(each.args[0] for each in walk(node) if each.head == "sym") - CONSTANTS


def in_radians(node: Node) -> Node:
    """The argument of a trigonometric function, degrees turned into radians."""
    if not any(each.head == "deg" for each in walk(node)):
        return node
    if node.head == "deg":
        return Node("mul", (node.args[0], symbol("pi"), number(Fraction(1, 180))))
    return node.replaced(in_radians(child) for child in node.children)


def substituted(node: Node, name: str, value: Node) -> Node:
    """The expression with a value in place of a variable."""
    if node == symbol(name):
        return value
    return node.replaced(substituted(child, name, value) for child in node.children)


def to_json(value: Any) -> Any:
    """Plain JSON of a node: ``[head, argument, ...]``, a fraction as ``{"q": "1/2"}``."""
    if isinstance(value, Node):
        return [value.head, *(to_json(arg) for arg in value.args)]
    if isinstance(value, tuple):
        return {"t": [to_json(item) for item in value]}
    return {"q": str(value)} if isinstance(value, Fraction) else value


def from_json(value: Any) -> Any:
    """The inverse of ``to_json``."""
    if isinstance(value, list):
        return Node(value[0], tuple(from_json(arg) for arg in value[1:]))
    if isinstance(value, dict):
        return Fraction(value["q"]) if "q" in value else tuple(from_json(item) for item in value["t"])
    return value
