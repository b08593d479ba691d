"""Requests before they go to an engine: refused by name, and their seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from posttune.errors import DataError, UserError
from posttune.types import Request, Sampling

SEEDS = 1 << 62


def seed_of(request: Request, index: int = 0) -> int:
    """A seed for a sample of a request, below 2^62 + index. Scrambled: neighbouring seeds do not overlap."""
    digest = hashlib.blake2b(request.seed.to_bytes(16, "big", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "big") % SEEDS + index


def check(
    requests: Sequence[Request], sampling: Sampling, longest: int, *, tokenizer: bool, who: str
) -> None:
    """Refuse what cannot be answered, by the request's id. ``longest``: tokens of prompt and answer."""
    if "" in sampling.stop:
        raise UserError(
            "an empty stop string would end every completion at once",
            who="rollout.sampling.stop",
            fix="remove the empty string",
        )
    if sampling.stop and not tokenizer:
        raise UserError(
            "stop strings need a tokenizer, and this rollout has none",
            who=who,
            fix="give the model a tokenizer, or remove rollout.sampling.stop",
        )
    for request in requests:
        named, length = f"request {request.id!r}", len(request.prompt_ids)
        if length == 0:
            raise DataError("its prompt has no tokens", who=named, fix="remove empty prompts from the data")
        if length + sampling.max_new_tokens > longest:
            raise DataError(
                f"its prompt of {length} tokens and max_new_tokens {sampling.max_new_tokens} exceed the "
                f"longest sequence, {longest} tokens",
                who=named,
                fix="shorten or remove the prompt, or lower rollout.sampling.max_new_tokens",
            )
