"""From core's sampling to vLLM's, the same for the engine and the server."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from posttune.errors import DataError, UserError
from posttune.types import Request, Sampling

from posttune_vllm.installed import WHO

SEEDS = 1 << 62


def seed_of(request: Request) -> int:
    """The seed of sample 0; vLLM adds a sample's index. Scrambled: neighbouring seeds do not overlap."""
    digest = hashlib.blake2b(request.seed.to_bytes(16, "big", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "big") % SEEDS


def parameters(sampling: Sampling, *, logprobs: bool) -> dict[str, Any]:
    """Fields of SamplingParams, none left to the model's generation config.

    The EOS set is given as stop tokens, with the model's own ignored, so that exactly these end an answer.
    Stop strings are looked for in the text with special tokens, as core does.
    """
    if "" in sampling.stop:
        raise UserError(
            "an empty stop string would end every completion at once",
            who="rollout.sampling.stop",
            fix="remove the empty string",
        )
    return {
        "n": sampling.n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": 0,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(sampling.eos_ids),
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logprobs": 0 if logprobs else None,
    }


def check(requests: Sequence[Request], sampling: Sampling, max_length: int, tokenizer: bool) -> None:
    """Refuse what cannot be answered, by the request's id."""
    if sampling.stop and not tokenizer:
        raise UserError(
            "stop strings need a tokenizer, and this rollout has none",
            who=WHO,
            fix="give the model a tokenizer, or remove rollout.sampling.stop",
        )
    for request in requests:
        who, length = f"request {request.id!r}", len(request.prompt_ids)
        if length == 0:
            raise DataError("its prompt has no tokens", who=who, fix="remove empty prompts from the data")
        if length + sampling.max_new_tokens > max_length:
            raise DataError(
                f"its prompt of {length} tokens and max_new_tokens {sampling.max_new_tokens} exceed the "
                f"longest sequence, {max_length} tokens",
                who=who,
                fix="shorten or remove the prompt, or lower rollout.sampling.max_new_tokens",
            )
