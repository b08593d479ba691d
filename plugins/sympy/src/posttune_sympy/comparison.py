"""Whether two answers mean the same: lists, tuples, sets, matrices, equations, ratios, times, words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from posttune_sympy import matrices
from posttune_sympy.equations import (
    assigned_value,
    assigns,
    compatible,
    difference,
    named_side,
    states,
    turned,
)
from posttune_sympy.exact import rational
from posttune_sympy.nodes import Node, number, variables
from posttune_sympy.options import MathOptions
from posttune_sympy.sets import FLIPPED, is_set, same_set
from posttune_sympy.structures import (
    COLLECTIONS,
    MAX_UNORDERED,
    Items,
    as_rows,
    indexed,
    moduli,
    named,
    normal,
)
from posttune_sympy.values import Ask, Values


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
        gold, answer = indexed(gold, answer)
        gold, answer = normal(gold), normal(answer)
        if gold == answer:
            return True
        gold, answer, fits = moduli(gold, answer)
        if not fits:
            return False
        heads = {gold.head, answer.head}
        if "rel" in heads or is_set(gold) or is_set(answer):
            return self.related(gold, answer)
        if heads & COLLECTIONS:
            return self.collected(gold, answer)
        if "date" in heads:
            return gold.head == answer.head and _same_day(gold, answer)
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
            return self.relations(*named(gold, answer))
        if assigns(gold):
            return states(gold, sums=False) and self.same(assigned_value(gold), answer)
        if assigns(answer):
            return states(answer) and self.same(gold, assigned_value(answer))
        if gold.head != "rel" and answer.head == "rel" and answer.args[0] == ("in",):
            return self.same(gold, answer.args[2])
        if answer.head != "rel" and gold.head == "rel" and gold.args[0] == ("in",):
            return self.same(gold.args[2], answer)
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
        if assigns(gold) and assigns(answer):
            return self.equations(gold, answer)
        if assigns(gold) != assigns(answer):
            plain, set_like = (gold, answer) if assigns(gold) else (answer, gold)
            return set_like.args[0] == ("in",) and self.same(assigned_value(plain), set_like.args[2])
        if gold.args[0] == answer.args[0] == ("in",):
            return self.same(gold.args[2], answer.args[2])
        return self.inequalities(gold, answer)

    def equations(self, gold: Node, answer: Node) -> bool:
        """``x = 5`` by name and value, others as equations: both sides count."""
        names = named_side(gold), named_side(answer)
        values = assigned_value(gold), assigned_value(answer)
        if None not in names and compatible(*names, values[0]) and self.same(*values):
            return True
        if len(gold.args) != 3 or len(answer.args) != 3:
            return False
        if self.in_order(gold.args[1:], answer.args[1:]):
            return True
        first, second = difference(gold), difference(answer)
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
        for candidate in (answer, turned(answer)):
            if gold.args[0] == candidate.args[0] and self.in_order(gold.args[1:], candidate.args[1:]):
                return True
        if len(gold.args) != 3 or len(answer.args) != 3:
            return False
        first, second = difference(gold), difference(answer)
        ratio = self.values.proportional(first, second) if first and second else None
        if not ratio:
            return False
        operator = answer.args[0][0]
        return bool(gold.args[0][0] == (operator if ratio > 0 else FLIPPED.get(operator)))

    # --- collections ---------------------------------------------------------------------------

    def collected(self, gold: Node, answer: Node) -> bool:
        """Lists, tuples and sets, and a vector or a single value beside one."""
        if "matrix" in (gold.head, answer.head):
            rows = [as_rows(node) for node in (gold, answer)]
            if rows[0] is not None and rows[1] is not None:
                return self.matrices(rows[0], rows[1])
        left, right = Items.of(gold), Items.of(answer)
        if left is None or right is None:
            return False
        if {left.kind, right.kind} == {"set", "tuple"}:
            single, other = (left, answer) if left.kind == "set" else (right, gold)
            return (
                len(single.items) == 1
                and single.items[0].head == "group"
                and self.same(single.items[0], other)
            )
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
            if any(rational(part) == 0 for node in (gold, answer) for part in node.args):
                return False  # 17:00 is not 10:00
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


def _same_day(gold: Node, answer: Node) -> bool:
    """Month and day, and the year where both have one."""
    years = gold.args[2], answer.args[2]
    return gold.args[:2] == answer.args[:2] and (None in years or years[0] == years[1])


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


_BASES = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "hex": 16,
}


def _read(digits: str, base: str) -> int | None:
    name = base.replace("(", "").replace(")", "").strip().lower().removeprefix("base").strip()
    number_of_digits = _BASES.get(name) or (int(name) if name.isdecimal() and len(name) < 3 else 0)
    if not 2 <= number_of_digits <= 36 or any(
        int(each, 36) >= number_of_digits for each in digits if each.isalnum()
    ):
        return None
    return int(digits, number_of_digits) if digits.isalnum() else None
