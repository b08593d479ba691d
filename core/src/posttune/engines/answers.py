"""Prompts and answers as numbers: what crosses between the trainer and an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posttune.types import Completion, FinishReason, Request

REASONS: dict[str, FinishReason] = {"s": "stop", "l": "length", "a": "abort"}


@dataclass(frozen=True)
class Answer:
    """One sample as an engine gives it."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    reason: str  # first letter: stop, length or abort


def pack_prompts(prompts: Sequence[Sequence[int]]) -> tuple[dict[str, Any], bytes]:
    """Lengths, and all ids as int32."""
    flat = np.concatenate([np.asarray(prompt, dtype=np.int32) for prompt in prompts])
    return {"lengths": [len(prompt) for prompt in prompts]}, flat.tobytes()


def unpack_prompts(head: dict[str, Any], block: bytes) -> list[list[int]]:
    """What ``pack_prompts`` made."""
    flat, found, start = np.frombuffer(block, dtype=np.int32).tolist(), [], 0
    for length in head["lengths"]:
        found.append(flat[start : start + length])
        start += length
    return found


def pack_answers(answers: Sequence[Answer]) -> tuple[dict[str, Any], bytes]:
    """Lengths and reasons, then all ids as int32, then all log-probabilities as float32."""
    lengths = [len(answer.token_ids) for answer in answers]
    ids = np.fromiter((token for a in answers for token in a.token_ids), np.int32, sum(lengths))
    told = all(answer.logprobs is not None for answer in answers)
    block = ids.tobytes()
    if told:
        values = (value for a in answers for value in a.logprobs or ())
        block += np.fromiter(values, np.float32, sum(lengths)).tobytes()
    return {"lengths": lengths, "reasons": "".join(a.reason for a in answers), "logprobs": told}, block


def unpack_answers(head: dict[str, Any], block: bytes) -> list[Answer]:
    """What ``pack_answers`` made."""
    total = sum(head["lengths"])
    ids = np.frombuffer(block, dtype=np.int32, count=total).tolist()
    values = np.frombuffer(block, dtype=np.float32, offset=4 * total).tolist() if head["logprobs"] else None
    found, start = [], 0
    for length, reason in zip(head["lengths"], head["reasons"], strict=True):
        stop = start + length
        found.append(Answer(ids[start:stop], values[start:stop] if values is not None else None, reason))
        start = stop
    return found


def completions(
    requests: Sequence[Request], n: int, answers: Sequence[Answer], version: int
) -> list[Completion]:
    """Core's completions, request-major as the answers are."""
    if len(answers) != n * len(requests):
        raise RuntimeError(f"the engine gave {len(answers)} answers for {len(requests)} requests x {n}")
    return [
        Completion(
            request_id=requests[place // n].id,
            index=place % n,
            token_ids=tuple(answer.token_ids),
            logprobs=None if answer.logprobs is None else tuple(answer.logprobs),
            finish_reason=REASONS[answer.reason],
            weight_version=version,
        )
        for place, answer in enumerate(answers)
    ]
