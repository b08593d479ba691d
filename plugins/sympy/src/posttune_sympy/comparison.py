"""Whether two answers mean the same: lists, tuples, sets, matrices, equations, ratios, times, words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from posttune_sympy import matrices
from posttune_sympy.exact import rational
from posttune_sympy.nodes import CONSTANTS, Node, number, symbol, variables, walk
from posttune_sympy.options import MathOptions
from posttune_sympy.sets import FLIPPED, ORDERED, is_set, same_set
from posttune_sympy.values import Ask, Values

MAX_UNORDERED = 60  # longer lists are compared in order

_COLLECTIONS = frozenset({"seq", "rows", "group"})
_NAMES = frozenset({"sym", "mul", "inv", "abs", "ratio", "group", "fn", "unit", "add", "neg"})


@dataclass
class Comparison:
    """Compares two answers. ``ask`` is how SymPy is asked."""

    options: MathOptions
    ask: Ask
    values: Values = field(init=False)

    def __post_init__(self) -> None:
        self.values = Values(self.options, self.ask)

    def same(self, gold: Node, answer: Node) -> bool:
        """Whether the answer means the same as the reference."""
        gold, answer = normal(gold), normal(answer)
        if gold == answer:
            return True
        heads = {gold.head, answer.head}
        if "rel" in heads or is_set(gold) or is_set(answer):
            return self.related(gold, answer)
        if heads & _COLLECTIONS:
            return self.collected(gold, answer)
        if "time" in heads:
            return _clock(gold) is not None and _clock(gold) == _clock(answer)
        if "ratio" in heads:
            return self.ratios(gold, answer)
        if "base" in heads:
            return _bases(gold, answer)
        if matrices.has_matrix(gold) or matrices.has_matrix(answer):
            return self.matrices(gold, answer)
        return self.values.same(gold, answer)

    # --- relations -----------------------------------------------------------------------------

    def related(self, gold: Node, answer: Node) -> bool:
        """Where one side at least is an equation, an inequality or a set."""
        if gold.head == answer.head == "rel":
            return self.relations(gold, answer)
        if _assigns(gold):
            return states(gold, sums=False) and self.same(assigned_value(gold), answer)
        if _assigns(answer):
            return states(answer) and self.same(gold, assigned_value(answer))
        if is_set(gold) or is_set(answer):
            return self.sets(gold, answer)
        return False

    def sets(self, gold: Node, answer: Node) -> bool:
        found = same_set(gold, answer, self.values)
        if found is not None:
            return found
        if gold.head == answer.head == "union" and len(gold.args) == len(answer.args):
            return self.in_order(gold.args, answer.args)
        if gold.head == "seq" and answer.head == "seq":
            return self.collected(gold, answer)
        return len(variables(gold) | variables(answer)) <= 1 and self.ask("sets", gold, answer) is True

    def relations(self, gold: Node, answer: Node) -> bool:
        if _assigns(gold) and _assigns(answer):
            return self.equations(gold, answer)
        if _assigns(gold) != _assigns(answer):
            plain, set_like = (gold, answer) if _assigns(gold) else (answer, gold)
            return set_like.args[0] == ("in",) and self.same(assigned_value(plain), set_like.args[2])
        if gold.args[0] == answer.args[0] == ("in",):
            return self.same(gold.args[2], answer.args[2])
        return self.inequalities(gold, answer)

    def equations(self, gold: Node, answer: Node) -> bool:
        """``x = 5`` by name and value, others as equations: both sides count."""
        names = named_side(gold), named_side(answer)
        values = assigned_value(gold), assigned_value(answer)
        if None not in names and _compatible(*names, values[0]) and self.same(*values):
            return True
        if len(gold.args) != 3 or len(answer.args) != 3:
            return False
        if self.in_order(gold.args[1:], answer.args[1:]):
            return True
        first, second = _difference(gold), _difference(answer)
        if first is None or second is None or not variables(gold):
            return False
        if self.values.proportional(first, second) is not None:
            return True
        return variables(gold) == variables(answer) and self.ask("equations", first, second) is True

    def inequalities(self, gold: Node, answer: Node) -> bool:
        if len(variables(gold)) == len(variables(answer)) == 1:
            if variables(gold) != variables(answer):
                return False
            return self.sets(gold, answer)
        for candidate in (answer, _turned(answer)):
            if gold.args[0] == candidate.args[0] and self.in_order(gold.args[1:], candidate.args[1:]):
                return True
        if len(gold.args) != 3 or len(answer.args) != 3:
            return False
        first, second = _difference(gold), _difference(answer)
        ratio = self.values.proportional(first, second) if first and second else None
        if not ratio:
            return False
        operator = answer.args[0][0]
        return bool(gold.args[0][0] == (operator if ratio > 0 else FLIPPED.get(operator)))

    # --- collections ---------------------------------------------------------------------------

    def collected(self, gold: Node, answer: Node) -> bool:
        """Lists, tuples and sets, and a vector or a single value beside one."""
        left, right = _Items.of(gold), _Items.of(answer)
        if left is None or right is None:
            return False
        if {left.kind, right.kind} == {"set", "tuple"}:
            return False
        if left.brackets and right.brackets and len(left.items) == 2 and left.brackets != right.brackets:
            return False  # intervals
        if "tuple" in (left.kind, right.kind):
            return self.in_order(left.items, right.items)
        return self.in_any_order(left.items, right.items)

    def in_order(self, gold: Sequence[Node], answer: Sequence[Node]) -> bool:
        """Whether the items are the same one by one."""
        return len(gold) == len(answer) and all(map(self.same, gold, answer))

    def in_any_order(self, gold: Sequence[Node], answer: Sequence[Node]) -> bool:
        """Whether the items are the same in some order; an item that is repeated counts once."""
        gold, left = list(dict.fromkeys(gold)), list(dict.fromkeys(answer))
        if len(gold) != len(left) or len(gold) > MAX_UNORDERED:
            return self.in_order(gold, left)
        for wanted in gold:
            found = next((item for item in left if self.same(wanted, item)), None)
            if found is None:
                return False
            left.remove(found)
        return True

    def ratios(self, gold: Node, answer: Node) -> bool:
        """``2:3``: part by part, or in proportion; of two parts also as a fraction."""
        if gold.head == answer.head:
            if len(gold.args) != len(answer.args):
                return False
            if self.in_order(gold.args, answer.args):
                return True
            products = [
                (_times(gold.args[0], b), _times(answer.args[0], a))
                for a, b in zip(gold.args[1:], answer.args[1:], strict=True)
            ]
            return all(self.values.equal(*pair) for pair in products)
        ratio, other = (gold, answer) if gold.head == "ratio" else (answer, gold)
        return len(ratio.args) == 2 and self.same(_times(ratio.args[0], Node("inv", (ratio.args[1],))), other)

    def matrices(self, gold: Node, answer: Node) -> bool:
        first, second = matrices.evaluated(gold), matrices.evaluated(answer)
        if first is None or second is None:
            return self.values.same(gold, answer) if gold.head == "det" or answer.head == "det" else False
        shapes = [[len(row) for row in matrix] for matrix in (first, second)]
        return shapes[0] == shapes[1] and all(self.in_order(a, b) for a, b in zip(first, second, strict=True))


@dataclass(frozen=True)
class _Items:
    items: Sequence[Node]
    kind: str  # list, set, tuple, or any: plain braces
    brackets: tuple[str, str] | None = None

    @classmethod
    def of(cls, node: Node) -> _Items | None:
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
    if node.head == "unit" and node.args[0].head in (*_COLLECTIONS, "rel", "ratio", "matrix", "union"):
        return normal(node.args[0])
    if node.head == "rows":
        return Node("seq", tuple(_row(row) for row in node.args))
    if node.head == "seq":
        return _flat("seq", node)
    if node.head == "group" and node.args[0] in (r"\{", "{"):
        flat = _flat("seq", Node("seq", node.args[2:]))
        return Node("group", (*node.args[:2], *flat.args))
    if node.head == "union" and any(part.head == "union" for part in node.args):
        return _flat("union", node)
    if any(each.head in ("pm", "mp") for each in walk(node)):
        return Node("seq", (_signed(node, 1), _signed(node, -1)))
    return node


def _flat(head: str, node: Node) -> Node:
    parts = [normal(part) for part in node.args]
    return Node(head, tuple(item for part in parts for item in (part.args if part.head == head else (part,))))


def _row(row: Node) -> Node:
    return Node("group", ("(", ")", *row.args)) if row.head == "seq" else row


def _signed(node: Node, sign: int) -> Node:
    if node.head in ("pm", "mp"):
        left, right = (_signed(arg, sign) for arg in node.args)
        plus = (node.head == "pm") == (sign > 0)
        return Node("add", (left, right if plus else Node("neg", (right,))))
    return node.replaced(_signed(child, sign) for child in node.children)


# --- equations -----------------------------------------------------------------------------------


def _assigns(node: Node) -> bool:
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
    if any(side.head in ("add", "pow") and variables(side) for side in others) and (
        not sums or rational(value) == 0
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


def _compatible(first: Node | None, second: Node | None, value: Node) -> bool:
    """x = 2 is not y = 2, nor cos A = 1 sin A = 1; but f(x) = 2 x may be y = 2 x, and |AB| = 1 AB = 1."""
    if first is None or second is None or first == second or first.head != second.head:
        return True
    return bool(variables(value)) or first.head not in ("sym", "fn")


def _difference(node: Node) -> Node | None:
    left, right = node.args[1:3]
    if any(each.head in (*_COLLECTIONS, "matrix", "ratio") for side in (left, right) for each in walk(side)):
        return None
    return Node("add", (left, Node("neg", (right,))))


def _turned(node: Node) -> Node:
    """``a < b`` as ``b > a``."""
    operators, *sides = node.args
    if not set(operators) <= ORDERED:
        return node
    return Node("rel", (tuple(FLIPPED[each] for each in reversed(operators)), *reversed(sides)))


def _clock(node: Node) -> int | None:
    """Seconds since midnight of a time of day; ``20:34`` alone is a ratio that may be one."""
    if node.head == "time":
        seconds: int = node.args[0]
        return seconds
    if node.head != "ratio" or len(node.args) != 2:
        return None
    hour, minute = (rational(part) for part in node.args)
    if hour is None or minute is None or not (0 <= hour < 24 and 0 <= minute < 60):
        return None
    return int(hour) * 3600 + int(minute) * 60


# --- leaves --------------------------------------------------------------------------------------


def _times(left: Node, right: Node) -> Node:
    return Node("mul", (left, right))


def _bases(gold: Node, answer: Node) -> bool:
    """``443_5``: the same number; or the same digits where one side leaves the base out."""
    if gold.head == answer.head:
        values = [_read(*node.args) for node in (gold, answer)]
        return None not in values and values[0] == values[1]
    based, plain = (gold, answer) if gold.head == "base" else (answer, gold)
    return based.args[0].isdecimal() and rational(plain) == rational(number(int(based.args[0])))


_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}


def _read(digits: str, base: str) -> int | None:
    name = base.strip(" ()").lower()
    number_of_digits = _BASES.get(name) or (int(name) if name.isdecimal() and len(name) < 3 else 0)
    if not 2 <= number_of_digits <= 36 or any(
        int(each, 36) >= number_of_digits for each in digits if each.isalnum()
    ):
        return None
    return int(digits, number_of_digits) if digits.isalnum() else None
