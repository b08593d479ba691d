"""One way of writing lists, tuples, sets, matrices and conditions, so that they can be laid side by side."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from posttune_sympy.exact import rational
from posttune_sympy.grammar import ANY
from posttune_sympy.nodes import Node, number, substituted, symbol, variables, walk

MAX_UNORDERED = 60  # longer lists are compared in order

COLLECTIONS = frozenset({"seq", "rows", "group"})


@dataclass(frozen=True)
class Items:
    """The items of a list, tuple or set, in order."""

    items: Sequence[Node]
    kind: str  # list, set, tuple, or any: plain braces
    brackets: tuple[str, str] | None = None

    @classmethod
    def of(cls, node: Node) -> Items | None:
        """Those of a node; itself where it is a single value, None for a matrix of several columns."""
        if node.head in ("seq", "rows"):
            return cls(node.args, "list")
        if node.head == "matrix":
            rows = node.args
            flat = rows[0] if len(rows) == 1 else [row[0] for row in rows if len(row) == 1]
            return cls(flat, "tuple") if len(rows) in (1, len(flat)) else None
        if node.head != "group":
            return cls((node,), "any")
        opening, closing, *items = node.args
        if opening in (r"\{", "{"):
            return cls(items, "set" if opening == r"\{" else "any")
        return cls(items, "tuple", (opening, closing))


def normal(node: Node) -> Node:
    """One way of writing: signs of plus or minus spread out, lists flat, units around lists gone."""
    if node.head == "unit" and node.args[0].head in (*COLLECTIONS, "rel", "ratio", "matrix", "union"):
        return normal(node.args[0])
    if node.head == "matrix" and len(node.args) == len(node.args[0]) == 1:
        return normal(node.args[0][0])
    if node.head == "rows":
        return Node("seq", tuple(_row(row) for row in node.args))
    if node.head == "seq":
        return _flat("seq", node)
    if node.head == "group" and node.args[0] in (r"\{", "{"):
        flat = _flat("seq", Node("seq", node.args[2:]))
        return Node("group", (*node.args[:2], *flat.args))
    if node.head == "union" and any(part.head == "union" for part in node.args):
        return _flat("union", node)
    if node.head == "mul" and len(node.args) == 2 and _is_point(*node.args):
        return normal(node.args[1])
    if any(each.head in ("pm", "mp") for each in walk(node)):
        return Node("seq", (_signed(node, 1), _signed(node, -1)))
    return node


def _is_point(name: Node, place: Node) -> bool:
    """``A(3, 4)``: a point with its name."""
    labelled = name.head == "sym" and name.args[0].isupper()
    return labelled and place.head == "group" and place.args[0] == "(" and len(place.args) > 3


def _flat(head: str, node: Node) -> Node:
    parts = [normal(part) for part in _progression(node.args)]
    return Node(head, tuple(item for part in parts for item in (part.args if part.head == head else (part,))))


def _row(row: Node) -> Node:
    return Node("group", ("(", ")", *row.args)) if row.head == "seq" else row


def _signed(node: Node, sign: int) -> Node:
    if node.head in ("pm", "mp"):
        left, right = (_signed(arg, sign) for arg in node.args)
        plus = (node.head == "pm") == (sign > 0)
        return Node("add", (left, right if plus else Node("neg", (right,))))
    return node.replaced(_signed(child, sign) for child in node.children)


def _progression(items: Sequence[Node]) -> Sequence[Node]:
    """``1, 2, dots, 10`` written out; anything else as it is."""
    if len(items) < 4 or items[-2] != symbol("dots"):
        return items
    known = [rational(item) for item in (*items[:-2], items[-1])]
    if None in known:
        return items
    values = [value for value in known if value is not None]
    step, last = values[1] - values[0], values[-1]
    if not step or any(b - a != step for a, b in itertools.pairwise(values[:-1])):
        return items
    count = (last - values[0]) / step
    if count.denominator != 1 or not len(values) - 1 <= count < MAX_UNORDERED:
        return items
    return [number(values[0] + step * place) for place in range(int(count) + 1)]


def indexed(gold: Node, answer: Node) -> tuple[Node, Node]:
    r"""Both without ``k \in \mathbb{Z}``; where both have one, with one name for what ranges."""
    (first, mine), (second, others) = _without_range(gold), _without_range(answer)
    if mine is not None and others is not None and mine != others and mine not in variables(second):
        second = substituted(second, others, symbol(mine))
    return first, second


def _without_range(node: Node) -> tuple[Node, str | None]:
    if node.head not in ("seq", "mul") or len(node.args) < 2:
        return node, None
    last = node.args[-1]
    if last.head != "rel" or last.args[0] != ("in",) or last.args[2] not in _INTEGERS:
        return node, None
    if last.args[1].head != "sym":
        return node, None
    rest = node.args[:-1]
    return rest[0] if len(rest) == 1 else Node(node.head, rest), last.args[1].args[0]


_INTEGERS = (symbol("Z"), symbol("N"))


def moduli(gold: Node, answer: Node) -> tuple[Node, Node, bool]:
    """Both without ``(mod m)``, reduced where both have it; and whether the moduli agree."""
    found = [{each.args[1] for each in walk(node) if each.head == "modulo"} for node in (gold, answer)]
    if not any(found):
        return gold, answer, True
    both = all(found)
    return _residue(gold, both), _residue(answer, both), not both or found[0] == found[1]


def _residue(node: Node, reduce: bool) -> Node:
    if node.head != "modulo":
        return node.replaced(_residue(child, reduce) for child in node.children)
    value, modulus = (rational(arg) for arg in node.args)
    if not reduce or value is None or not modulus:
        return _residue(node.args[0], reduce)
    return number(value % modulus)


def named(gold: Node, answer: Node) -> tuple[Node, Node]:
    """Both with the other's variable where nothing stands on the left: ``>= 5``."""
    for one, other in ((gold, answer), (answer, gold)):
        names = variables(other)
        if ANY in one.args and len(names) == 1:
            renamed = substituted(one, ANY.args[0], symbol(next(iter(names))))
            return (renamed, other) if one is gold else (other, renamed)
    return gold, answer


def as_rows(node: Node) -> Node | None:
    """A matrix, or a list of lists of one length as one."""
    if node.head == "matrix":
        return node
    if node.head != "group" or node.args[0] not in ("[", "("):
        return None
    rows = node.args[2:]
    if any(row.head != "group" or len(row.args) != len(rows[0].args) for row in rows):
        return None
    return Node("matrix", tuple(tuple(row.args[2:]) for row in rows))
