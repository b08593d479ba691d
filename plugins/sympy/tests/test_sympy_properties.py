"""Properties: no text raises, equality is symmetric, and values agree with arithmetic done otherwise."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st
from posttune_sympy import MathRewardFunction
from posttune_sympy.approximate import Unknown, approximate
from posttune_sympy.exact import PRIME, fingerprint, prime_root, rational
from posttune_sympy.grammar import parse
from posttune_sympy.nodes import Node, Undefined, from_json, to_json

reward = MathRewardFunction(time_limit=1.0)
PIECES = [
    r"\frac", r"\sqrt", r"\pm", r"\le", r"\cup", r"\in", r"\text{a}", r"\begin{pmatrix}", r"\end{pmatrix}",
    r"\\", r"\boxed{", r"\pi", r"\infty", r"\sum_{k=1}^{3}", r"\log", r"\circ", r"\overline", r"\bmod",
    r"\lfloor", r"\%", r"\$", r"\{", r"\}", *"{}()[]^_|=<,;-!%&$:' 01xi", "12", "or", "####", "</think>",
    "<answer>", "the answer is", "²", "½", "\x00", "\ud800",
]  # fmt: skip
hostile = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=25).map("".join))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(hostile, hostile)
def test_any_two_texts_have_a_score(reference: str, response: str) -> None:
    assert reward.compute_reward(prompt="", response=response, reference=reference) in (0.0, 1.0)


numbers = st.integers(-40, 40)


@st.composite
def arithmetic(draw: st.DrawFn, depth: int = 3) -> tuple[str, Fraction]:
    """An expression in LaTeX and its value."""
    if depth == 0 or draw(st.booleans()):
        value = draw(numbers)
        return (str(value) if value >= 0 else f"({value})"), Fraction(value)
    left, first = draw(arithmetic(depth=depth - 1))
    right, second = draw(arithmetic(depth=depth - 1))
    operator = draw(st.sampled_from(["+", "-", r"\cdot", r"\frac", "^"]))
    if operator == "+":
        return f"({left} + {right})", first + second
    if operator == "-":
        return f"({left} - {right})", first - second
    if operator == r"\frac" and second:
        return rf"\frac{{{left}}}{{{right}}}", first / second
    if operator == "^":
        power = draw(st.integers(0, 4))
        return f"({left})^{{{power}}}", first**power if first or power else Fraction(1)
    return rf"({left}) \cdot ({right})", first * second


@settings(max_examples=300, deadline=None, derandomize=True)
@given(arithmetic())
def test_values_agree_with_fractions(case: tuple[str, Fraction]) -> None:
    text, value = case
    node = parse(text)
    try:
        assert rational(node) == value
    except Undefined:
        assert "^{0}" in text  # 0^0
        return
    assert fingerprint(node) == (value.numerator * pow(value.denominator, -1, PRIME) % PRIME, True)
    try:
        near = approximate(node, {})
        assert abs(near.at - complex(value)) <= near.error + 1e-12
    except Unknown:
        assert "^" in text  # a power of what rounding cannot tell from 0
    assert from_json(to_json(node)) == node
    assert reward.compute_reward(prompt="", response=rf"\boxed{{{text}}}", reference=str(value)) == 1.0
    assert reward.compute_reward(prompt="", response=rf"\boxed{{{text}}}", reference=str(value + 1)) == 0.0


@settings(deadline=None)
@given(st.sampled_from([2, 3, 5, 7, 11, 97, PRIME - 1]))
def test_square_roots_modulo_the_prime(value: int) -> None:
    assert prime_root(value) ** 2 % PRIME == value


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_square_roots_multiply(a: int, b: int) -> None:
    root = Node("mul", (parse(rf"\sqrt{{{a}}}"), parse(rf"\sqrt{{{b}}}")))
    whole, together = fingerprint(root), fingerprint(parse(rf"\sqrt{{{a * b}}}"))
    if whole[1] and together[1]:
        assert whole == together


def test_what_has_no_value_equals_nothing() -> None:
    for response, reference in [("0_0", "0/0"), ("1", "0/0"), ("0/0", "1"), ("1/0", "2/0")]:
        assert reward.compute_reward(prompt="", response=rf"\boxed{{{response}}}", reference=reference) == 0.0
