"""Hostile texts: none is executed, none crashes, none is waited for beyond the limit."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from posttune_sympy import MathRewardFunction

pytestmark = pytest.mark.slow

LIMIT = 1.0  # seconds of SymPy
ROOM = 60.0  # seconds: a hang would last for ever, so that this tells no speed

MARKER = "MARKER"
TEXTS = {
    "import": f"__import__('os').system('touch {MARKER}')",
    "import in a box": rf"\boxed{{__import__('os').system('touch {MARKER}')}}",
    "exec": f"exec(\"open('{MARKER}', 'w')\") or 5",
    "eval": r"\boxed{eval('5')}",
    "lambda": rf"\boxed{{(lambda: open('{MARKER}', 'w'))() or 5}}",
    "dunder chain": r"\boxed{().__class__.__bases__[0].__subclasses__()}",
    "sympy's names": rf"\boxed{{Symbol('x').subs.__globals__['os'].system('touch {MARKER}')}}",
    "tex write": rf"\immediate\write18{{touch {MARKER}}} \boxed{{\input{{|'touch {MARKER}'}}}}",
    "tex recursion": r"\boxed{\def\x{\x}\x}",
    "power tower": r"\boxed{9^{9^{9^{9}}}}",
    "power tower in Python": "9**9**9**9",
    "large factorial": r"\boxed{(10^9)!}",
    "large binomial": r"\boxed{\binom{10^9}{5 \cdot 10^8}}",
    "large product": r"\boxed{\prod_{k=1}^{10^9} k}",
    "long sum": r"\boxed{\sum_{k=1}^{10^{12}} \sin k}",
    "hard integral": r"\boxed{\int_0^1 x^{x^{x}} dx}",
    "large exponent": "1e999999999",
    "unreachable expansion": r"\boxed{(a+b+c+d+e)^{4000} - 1}",
    "deep brackets": r"\boxed{" + "(" * 100_000 + "1" + ")" * 100_000 + "}",
    "deep fractions": r"\frac{1}{" * 5_000 + "1" + "}" * 5_000,
    "open braces": "{" * 1_000_000,
    "open boxes": r"\boxed{" * 100_000,
    "bars": r"\boxed{" + "|" * 5_000 + "}",
    "signs": r"\boxed{" + "-" * 5_000 + "1}",
    "environments": r"\begin{pmatrix}" * 5_000,
    "megabyte of digits": "7" * 1_000_000,
    "megabyte of letters": "a" * 1_000_000,
    "megabyte of dollars": "$" * 1_000_000,
    "megabyte of spaces": " " * 1_000_000,
    "phrases": "the answer is " * 70_000,
    "hashes": "#### " * 200_000,
    "many answers": r"\boxed{" + ", ".join(map(str, range(8, 20_008))) + "}",
    "nul": "\x00" * 1_000,
    "surrogates": "\ud800\udfff \\boxed{\ud800}",
    "right to left": "\u202e\\boxed{\u202e\u2066 6}",
    "open think tags": "<think>" * 10_000 + r"\boxed{5}",
    "closing think tags": r"\boxed{5}" + "</think>" * 10_000,
    "control characters": "".join(map(chr, range(32))) * 1_000,
}


@pytest.fixture(scope="module")
def reward() -> MathRewardFunction:
    return MathRewardFunction(time_limit=LIMIT)


@pytest.mark.parametrize("name", TEXTS)
def test_a_hostile_response(
    name: str, reward: MathRewardFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    assert reward.compute_reward(prompt="", response=TEXTS[name], reference="5") == 0.0
    assert time.monotonic() - began < LIMIT + ROOM
    assert not (tmp_path / MARKER).exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_a_hostile_reference(
    name: str, reward: MathRewardFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    assert reward.compute_reward(prompt="", response=r"\boxed{5}", reference=TEXTS[name]) == 0.0
    assert time.monotonic() - began < LIMIT + ROOM
    assert not (tmp_path / MARKER).exists()


def test_a_right_answer_among_nested_brackets(reward: MathRewardFunction) -> None:
    response = r"\boxed{" + "(" * 2_000 + "5" + ")" * 2_000 + "}"
    assert reward.compute_reward(prompt="", response=response, reference="5") == 1.0


def test_no_evaluation_of_text_in_the_sources() -> None:
    """The words that run or parse text with SymPy or Python occur nowhere."""
    sources = Path(__file__).parents[1] / "src" / "posttune_sympy"
    forbidden = ("eval(", "exec(", "parse_expr", "sympify(", "parse_latex", "pickle", "SIGALRM", "lambdify")
    for path in sources.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert [word for word in forbidden if word in text] == [], path
