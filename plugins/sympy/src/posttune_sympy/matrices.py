"""Sums and multiples of matrices, and products of small ones."""

from __future__ import annotations

from posttune_sympy.nodes import Node, product, symbol, walk

MAX_SIDE = 12  # of matrices that are multiplied

Rows = tuple[tuple[Node, ...], ...]


def has_matrix(node: Node) -> bool:
    """Whether a matrix stands in it."""
    return any(each.head == "matrix" for each in walk(node))


def evaluated(node: Node) -> Rows | None:
    """The entries of a matrix expression; None for anything else and for shapes that do not fit."""
    if node.head == "matrix":
        return node.args
    if node.head == "unit":
        return evaluated(node.args[0])
    if node.head == "neg":
        inner = evaluated(node.args[0])
        return inner and tuple(tuple(Node("neg", (entry,)) for entry in row) for row in inner)
    if node.head == "pow" and node.args[1] in (symbol("T"), symbol("top")):
        inner = evaluated(node.args[0])
        regular = inner is not None and len({len(row) for row in inner}) == 1
        return tuple(zip(*inner, strict=True)) if inner and regular else None
    if node.head == "add":
        return _sum([evaluated(arg) for arg in node.args])
    if node.head == "mul":
        return _product(node)
    return None


def _sum(parts: list[Rows | None]) -> Rows | None:
    shapes = {tuple(len(row) for row in part) if part else None for part in parts}
    if None in shapes or len(shapes) != 1:
        return None
    known = [part for part in parts if part]
    return tuple(
        tuple(Node("add", entries) for entries in zip(*rows, strict=True))
        for rows in zip(*known, strict=True)
    )


def _product(node: Node) -> Rows | None:
    result: Rows | None = None
    scale: Node | None = None
    for factor in node.args:
        if not has_matrix(factor):
            scale = factor if scale is None else product(scale, factor)
            continue
        matrix = evaluated(factor)
        if matrix is None:
            return None
        result = matrix if result is None else _multiplied(result, matrix)
        if result is None:
            return None
    if result is None or scale is None:
        return result
    return tuple(tuple(product(scale, entry) for entry in row) for row in result)


def _multiplied(left: Rows, right: Rows) -> Rows | None:
    if max(len(left), len(right), len(right[0])) > MAX_SIDE or any(len(row) != len(right) for row in left):
        return None
    if len({len(row) for row in right}) != 1:
        return None
    columns = list(zip(*right, strict=True))
    return tuple(
        tuple(
            Node("add", tuple(product(a, b) for a, b in zip(row, column, strict=True))) for column in columns
        )
        for row in left
    )
