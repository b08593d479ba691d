"""Sets of real numbers as sorted pieces: intervals, points, solutions of linear inequalities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cmp_to_key

from posttune_sympy.exact import rational
from posttune_sympy.nodes import Node, Undefined, number, substituted, symbol, variables, walk
from posttune_sympy.values import Values

MAX_PIECES = 60
INFINITY = symbol("oo")
MINUS_INFINITY = Node("neg", (INFINITY,))
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
ORDERED = frozenset({"<", ">", "<=", ">="})


class NotASet(Exception):
    """No set of real numbers, or none that is understood here."""


@dataclass(frozen=True)
class Piece:
    """An interval; a point where both ends are the same."""

    low: Node
    low_closed: bool
    high: Node
    high_closed: bool


ALL = Piece(MINUS_INFINITY, False, INFINITY, False)


def is_set(node: Node) -> bool:
    """Whether it can only be read as a set: a union, R, an inequality, x in A."""
    if node.head in ("union", "inter", "minus") or node in (symbol("R"), symbol("emptyset")):
        return True
    if node.head == "rel":
        return any(operator in ORDERED or operator in ("!=", "in") for operator in node.args[0])
    return node.head == "seq" and all(is_set(item) and item.head == "rel" for item in node.args)


def same_set(left: Node, right: Node, values: Values) -> bool | None:
    """Whether two answers are the same set of reals; None where one is not understood."""
    reader = _Sets(values)
    try:
        first, second = reader.sorted(reader.pieces(left)), reader.sorted(reader.pieces(right))
        return len(first) == len(second) and all(
            a.low_closed == b.low_closed
            and a.high_closed == b.high_closed
            and reader.equal(a.low, b.low)
            and reader.equal(a.high, b.high)
            for a, b in zip(first, second, strict=True)
        )
    except (NotASet, Undefined):
        return None


@dataclass(frozen=True)
class _Sets:
    values: Values

    def pieces(self, node: Node) -> list[Piece]:
        """The pieces of a set, in any order. Raises NotASet."""
        if node == symbol("R"):
            return [ALL]
        if node == symbol("emptyset"):
            return []
        if node.head == "union":
            return [piece for part in node.args for piece in self.pieces(part)]
        if node.head == "inter":
            return self.common(*(self.pieces(part) for part in node.args))
        if node.head == "minus":
            return self.common(self.pieces(node.args[0]), self.complement(self.pieces(node.args[1])))
        if node.head == "group":
            return _grouped(node)
        if node.head == "rel":
            return self.relation(node)
        if node.head == "seq" and is_set(node):
            parts = [self.pieces(part) for part in node.args]
            union = [piece for part in parts for piece in part]
            # "x > 0, x < 5" cannot mean all reals: it is meant as both at once.
            return self.common(*parts) if self.sorted(union) == [ALL] else union
        raise NotASet

    def relation(self, node: Node) -> list[Piece]:
        """``x in A``, ``x != a``, and chains of inequalities in one variable."""
        operators, *sides = node.args
        if operators == ("in",):
            return self.pieces(sides[1])
        if operators[0] == "=" and len(sides) > 2 and set(operators[1:]) <= ORDERED:
            operators, sides = operators[1:], sides[1:]  # y = f(x) > 0
        parts = [self.solved(sides[i], operators[i], sides[i + 1]) for i in range(len(operators))]
        return parts[0] if len(parts) == 1 else self.common(*parts)

    def solved(self, left: Node, operator: str, right: Node) -> list[Piece]:
        names = variables(left) | variables(right)
        if len(names) != 1 or operator not in FLIPPED:
            raise NotASet
        if not variables(left):
            left, operator, right = right, FLIPPED[operator], left
        if variables(right):
            left, right = Node("add", (left, Node("neg", (right,)))), number(0)
        if left.head == "abs" and left.args[0].head == "sym":
            return self.bounded(operator, right)
        if left.head != "sym":
            operator, right = _linear(left, next(iter(names)), operator, right)
        return _ray(operator, right)

    def bounded(self, operator: str, size: Node) -> list[Piece]:
        """``|x| < a``."""
        opposite = Node("neg", (size,))
        if operator in ("<", "<="):
            return self.common(_ray(operator, size), _ray(FLIPPED[operator], opposite))
        if operator == "!=":
            return self.common(_ray("!=", size), _ray("!=", opposite))
        return _ray(operator, size) + _ray(FLIPPED[operator], opposite)

    def common(self, *parts: list[Piece]) -> list[Piece]:
        """The intersection."""
        result = parts[0]
        for part in parts[1:]:
            if len(result) * len(part) > MAX_PIECES**2:
                raise NotASet
            result = [piece for a in result for b in part if (piece := self.overlap(a, b)) is not None]
        return result

    def overlap(self, a: Piece, b: Piece) -> Piece | None:
        low, high = a, a
        order = self.compare(a.low, b.low)
        if order < 0 or (order == 0 and not b.low_closed):
            low = b
        order = self.compare(a.high, b.high)
        if order > 0 or (order == 0 and not b.high_closed):
            high = b
        piece = Piece(low.low, low.low_closed, high.high, high.high_closed)
        return None if self.empty(piece) else piece

    def empty(self, piece: Piece) -> bool:
        order = self.compare(piece.low, piece.high)
        return order > 0 or (order == 0 and not (piece.low_closed and piece.high_closed))

    def complement(self, pieces: list[Piece]) -> list[Piece]:
        """All other reals."""
        result, low, closed = [], MINUS_INFINITY, False
        for piece in self.sorted(pieces):
            result.append(Piece(low, closed, piece.low, not piece.low_closed))
            low, closed = piece.high, not piece.high_closed
        result.append(Piece(low, closed, INFINITY, False))
        return [piece for piece in result if not self.empty(piece)]

    def sorted(self, pieces: Sequence[Piece]) -> list[Piece]:
        """In order, with those joined that touch."""
        if len(pieces) > MAX_PIECES:
            raise NotASet
        kept = [piece for piece in pieces if not self.empty(piece)]
        by_low: Callable[[Piece], object] = cmp_to_key(lambda a, b: self.compare(a.low, b.low))
        result: list[Piece] = []
        for piece in sorted(kept, key=by_low):  # type: ignore[arg-type]
            last = result[-1] if result else None
            order = 1 if last is None else self.compare(piece.low, last.high)
            if last is None or order > 0 or (order == 0 and not (piece.low_closed or last.high_closed)):
                result.append(piece)
                continue
            if self.equal(piece.low, last.low):
                last = replace(last, low_closed=last.low_closed or piece.low_closed)
            order = self.compare(piece.high, last.high)
            if order > 0:
                last = replace(last, high=piece.high, high_closed=piece.high_closed)
            elif order == 0:
                last = replace(last, high_closed=last.high_closed or piece.high_closed)
            result[-1] = last
        return result

    def compare(self, a: Node, b: Node) -> int:
        """-1, 0 or 1. Raises NotASet where that cannot be told."""
        ranks = [_infinite(node) for node in (a, b)]
        if any(ranks):
            return (ranks[0] > ranks[1]) - (ranks[0] < ranks[1])
        less = self.values.less(a, b)
        if less is None:
            if self.values.equal(a, b):
                return 0
            raise NotASet
        return -1 if less else int(bool(self.values.less(b, a)))

    def equal(self, a: Node, b: Node) -> bool:
        ranks = [_infinite(node) for node in (a, b)]
        return ranks[0] == ranks[1] if any(ranks) else self.values.equal(a, b)


def _infinite(node: Node) -> int:
    if node == INFINITY:
        return 1
    if node.head == "neg" and node.args[0] == INFINITY:
        return -1
    return 0


def _grouped(node: Node) -> list[Piece]:
    opening, closing, *items = node.args
    if opening in (r"\{", "{"):
        return [Piece(item, True, item, True) for item in items]
    if len(items) != 2 or any(each.head in ("group", "seq", "rel") for item in items for each in walk(item)):
        raise NotASet
    if items[0] == items[1] and (opening, closing) != ("[", "]"):
        raise NotASet  # a point such as (0, 0), no empty interval
    return [Piece(items[0], opening == "[", items[1], closing == "]")]


def _ray(operator: str, end: Node) -> list[Piece]:
    """The reals that stand in a relation to ``end``."""
    below = Piece(MINUS_INFINITY, False, end, operator == "<=")
    above = Piece(end, operator == ">=", INFINITY, False)
    if operator == "=":
        return [Piece(end, True, end, True)]
    if operator == "!=":
        return [below, above]
    return [below] if operator in ("<", "<=") else [above]


def _linear(left: Node, name: str, operator: str, right: Node) -> tuple[str, Node]:
    """``a x + b < c`` as ``x < (c - b) / a``, for rational a and b. Raises NotASet."""
    at = [rational(substituted(left, name, number(point))) for point in (0, 1, 2, Fraction(7, 3))]
    if None in at:
        raise NotASet
    start, one, two, other = (value or Fraction(0) for value in at)
    slope = one - start
    if not slope or two - one != slope or other - start != slope * Fraction(7, 3):
        raise NotASet
    moved = Node("add", (right, number(-start)))
    return operator if slope > 0 else FLIPPED[operator], Node("mul", (moved, number(1 / slope)))
