"""Where an answer ends: the same for every engine, whatever an engine makes of its last token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from posttune.engines.answers import Answer
from posttune.types import Sampling


def settled(answer: Answer, sampling: Sampling, tokenizer: Any) -> Answer:
    """The answer up to the first end token, or to the token that completes a stop string; both are kept.

    An end in the last place that ``max_new_tokens`` allows is a stop. Some engines call it a length, and
    some look for a stop string in fewer tokens than it can take.
    """
    ids = answer.token_ids
    first = next((place + 1 for place, token in enumerate(ids) if token in sampling.eos_ids), 0)
    length = first or len(ids)
    look = sampling.stop and tokenizer is not None
    spelled = _completes(ids[:length], sampling.stop, tokenizer) if look else 0
    length = spelled or length
    if not (first or spelled) or (length == len(ids) and answer.reason == "s"):
        return answer
    told = answer.logprobs
    return replace(
        answer, token_ids=ids[:length], logprobs=told if told is None else told[:length], reason="s"
    )


def _completes(ids: Sequence[int], strings: Sequence[str], tokenizer: Any) -> int:
    """Number of tokens with which the first stop string is whole; 0 where none is."""

    def whole(count: int) -> bool:
        text = tokenizer.decode(list(ids[:count]), skip_special_tokens=False)
        return any(string in text for string in strings)

    if not whole(len(ids)):
        return 0
    low, high = 1, len(ids)  # what a text holds, every longer one holds
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if whole(middle) else (middle + 1, high)
    return low
