"""The published table of forms that `gsm8k` accepts, and what it must not do."""

from __future__ import annotations

from fractions import Fraction

import pytest
from posttune.config.models import PluginRef
from posttune.errors import DataError, PluginOptionsError
from posttune.facade import build_rewards
from posttune.reward.gsm8k import GSM8KReward, extract_answer, reference_number
from posttune.reward.numbers import numbers
from posttune.types import Sample

STRICT = [
    # hashes
    ("so 3 * 4 = 12\n#### 12", 12),
    ("#### 1,234", 1234),
    ("####18", 18),
    ("#### $18.00", 18),
    ("#### -5", -5),
    ("#### \u22125", -5),
    ("#### -$5", -5),
    ("#### $-5", -5),
    ("#### +5", 5),
    ("#### 25%", 25),
    ("#### 0.5", Fraction(1, 2)),
    ("#### .5", Fraction(1, 2)),
    ("#### 1/2", Fraction(1, 2)),
    ("#### 18 dollars", 18),
    ("#### 5 + 3 = 8", 8),
    ("#### 18.", 18),
    ("#### 1,234,567.80", Fraction("1234567.8")),
    ("#### 5\nThat was easy, 3 times easier.", 5),
    ("#### 4\nNo, wait.\n#### 5", 5),
    ("#### €20", 20),
    ("#### **20**", 20),
    # box
    (r"\boxed{42}", 42),
    (r"so $\boxed{42}$.", 42),
    (r"\boxed{1{,}234}", 1234),
    (r"\boxed{1\,234}", 1234),
    (r"\boxed{\$18}", 18),
    (r"\boxed{25\%}", 25),
    (r"\boxed{18\text{ dollars}}", 18),
    (r"\boxed{x = 18}", 18),
    (r"\boxed{\frac{1}{2}}", Fraction(1, 2)),
    (r"\boxed{-5}", -5),
    (r"\fbox{7}", 7),
    (r"\boxed 7", 7),
    (r"\boxed{\text{so }{12}}", 12),
    (r"first \boxed{3}, then \boxed{4}", 4),
    # phrase
    ("The answer is 18.", 18),
    ("The answer is $1,234.50.", Fraction("1234.5")),
    ("the final answer is: **18**", 18),
    ("**Answer:** 18", 18),
    ("Answer: 3 * 6 = 18 eggs", 18),
    ("answer = 18", 18),
    ("The answer is 18 because 2 * 9 = 18 and 18 - 0 = 18", 18),
    ("The answer is x = 18", 18),
    (r"The answer is \boxed{18}.", 18),
    ("The answer is 3. Hmm. The answer is 4", 4),
    # of two forms the later one counts
    ("The answer is 3.\n#### 4", 4),
    ("#### 4\nThe answer is 5", 5),
]
NONE = [
    "",
    "42",
    "I think 42 it is",
    "#### forty-two",
    "#### Step 1: add the numbers",
    "answers are 5",
    "The answer is in the box above",
    "The answer is below.\nThere are 3 apples",
    r"\boxed{}",
    "#### 5/0",
    "#### " + "9" * 61,
]
FLEXIBLE = [
    ("so she has 8 eggs left", 8),
    ("3 + 5 = 8, then 8 - 2 = 6", 6),
    ("10-5", 5),
    ("between 3\u20135", 5),
    ("it costs $1,234.50!", Fraction("1234.5")),
    ("#### 7 and then 8", 7),
    ("no numbers", None),
    ("version v2", None),
]


@pytest.mark.parametrize(("text", "value"), STRICT)
def test_accepted_forms(text, value):
    assert extract_answer(text) == extract_answer(text, "flexible") == value


@pytest.mark.parametrize("text", NONE)
def test_no_marked_answer(text):
    assert extract_answer(text) is None


@pytest.mark.parametrize(("text", "value"), FLEXIBLE)
def test_the_last_number_counts_where_the_mode_is_flexible(text, value):
    assert extract_answer(text, "flexible") == value


def test_the_whole_text_is_read():
    assert extract_answer("#### 5\n" + "and so on " * 20000) == 5
    assert extract_answer("word " * 20000 + "\n#### 5") == 5


def test_the_reference_may_be_a_whole_answer_a_number_or_several():
    reward = GSM8KReward()
    for reference in (
        "72",
        "72.00",
        "$72",
        "48+24 = <<48+24=72>>72\n#### 72",
        ["3", "72"],
        "72 apples",
        "0072",
    ):
        assert reward.compute_reward(prompt="", response="#### 72", reference=reference) == 1.0
        assert reward.compute_reward(prompt="", response="#### 73", reference=reference) == 0.0
    assert reference_number("no change\n#### 0") == 0


@pytest.mark.parametrize(("reference", "message"), [
    (None, "no reference"),
    ([], "no reference"),
    ("none", "'none' holds no number"),
])  # fmt: skip
def test_a_reference_that_cannot_be_used_is_refused(reference, message):
    with pytest.raises(DataError, match=message):
        GSM8KReward().compute_reward(prompt="", response="#### 72", reference=reference)


def test_options_reach_it_as_a_plugin():
    sample = Sample("s", 0, "", "it is 72", "72")
    for mode, value in (("strict", 0.0), ("flexible", 1.0)):
        rewards = build_rewards([PluginRef(name="gsm8k", options={"mode": mode})])
        assert rewards.needs["gsm8k"].reference
        assert rewards.score([sample]) == {"gsm8k": [value]}
    with pytest.raises(PluginOptionsError, match="mode"):
        build_rewards([PluginRef(name="gsm8k", options={"mode": "lenient"})])
    assert GSM8KReward(mode="flexible").compute_reward(prompt="", response="it is 72", reference="72") == 1.0


@pytest.mark.parametrize("text", [
    "answer is " * 50000,
    "#### " * 50000,
    "\\boxed{" * 50000,
    "1," * 100000,
    "9" * 500000,
    "-$" * 200000,
    "1.1." * 100000,
    "answer" + " " * 500000,
    "answer*_" * 60000,
    "{" * 300000,
    "\\frac{1}{" * 50000,
])  # fmt: skip
@pytest.mark.timeout(60)
def test_hostile_texts_take_no_longer_than_their_length(text):
    assert extract_answer(text) is None or text.startswith("9")
    extract_answer(text, "flexible")


def test_numbers_of_other_scripts_and_odd_marks():
    assert list(numbers("٤٢ ½ x² 3rd 1e5 #7")) == [42, 3, 1, 7]
