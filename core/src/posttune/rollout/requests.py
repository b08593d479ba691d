"""From rows of a dataset to requests, and from completions to the samples that rewards judge.

Shared by training, evaluation and the command line, so that a reward sees the same in each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from posttune.config.models import SamplingConfig
from posttune.types import Completion, Request, Sample, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKEN_COLUMNS = frozenset({"prompt_ids", "input_ids", "loss_mask"})
ROLE_COLUMNS = frozenset({"prompt", "response", "reference"})


def derive_seed(seed: int, *parts: int | str) -> int:
    """A seed of 63 bits that depends on ``seed`` and every part; the same in every process."""
    text = "\x1f".join([str(seed), *(str(part) for part in parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def make_sampling(config: SamplingConfig, eos_ids: Iterable[int], *, logprobs: bool = True) -> Sampling:
    """What the configuration says, for an engine."""
    return Sampling(
        n=config.n,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_new_tokens=config.max_new_tokens,
        stop=tuple(config.stop),
        eos_ids=frozenset(eos_ids),
        logprobs=logprobs,
    )


def make_requests(ids: Sequence[str], prompts: Sequence[Sequence[int]], *, seed: int) -> list[Request]:
    """One request per prompt. Its seed comes from ``seed`` and its id; give each step another ``seed``."""
    pairs = zip(ids, prompts, strict=True)
    return [
        Request(id=name, prompt_ids=tuple(prompt), seed=derive_seed(seed, name)) for name, prompt in pairs
    ]


def make_samples(
    rows: Sequence[Mapping[str, Any]],
    requests: Sequence[Request],
    completions: Sequence[Completion],
    tokenizer: PreTrainedTokenizerBase,
    origins: Sequence[str] = (),
) -> list[Sample]:
    """One sample per completion. ``rows[i]`` is the dataset's row of ``requests[i]``, from ``origins[i]``.

    A row without a ``prompt`` shows the decoded prompt; one without a ``reference`` takes its
    ``response`` for it. Every other column reaches the rewards by name.
    """
    row_of = {request.id: row for request, row in zip(requests, rows, strict=True)}
    prompts = {request.id: _prompt(row_of[request.id], request, tokenizer) for request in requests}
    columns = {name: other_columns(row) for name, row in row_of.items()}
    origin_of = dict(zip((request.id for request in requests), origins, strict=False))
    texts = response_texts(completions, tokenizer)
    return [
        Sample(
            id=f"{completion.request_id}/{completion.index}",
            group=completion.request_id,
            prompt=prompts[completion.request_id],
            response=text,
            reference=reference_of(row_of[completion.request_id]),
            columns=columns[completion.request_id],
            completion=completion,
            origin=origin_of.get(completion.request_id, ""),
        )
        for completion, text in zip(completions, texts, strict=True)
    ]


def response_texts(completions: Sequence[Completion], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The completions as text, without special tokens; a stop string that ended one is part of it."""
    ids = [list(completion.token_ids) for completion in completions]
    if not ids:  # transformers before 5.20 decodes an empty batch as one empty text
        return []
    return list(tokenizer.batch_decode(ids, skip_special_tokens=True))


def reference_of(row: Mapping[str, Any]) -> str | list[str] | None:
    """The row's reference, or else its response."""
    found = row.get("reference")
    value = row.get("response") if found is None else found
    return value if value is None or isinstance(value, str) else [str(item) for item in value]


def other_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """What of a row is neither tokens nor a role that samples have."""
    return {key: value for key, value in row.items() if key not in TOKEN_COLUMNS | ROLE_COLUMNS}


def _prompt(row: Mapping[str, Any], request: Request, tokenizer: PreTrainedTokenizerBase) -> str:
    text = row.get("prompt")
    return text if isinstance(text, str) else str(tokenizer.decode(list(request.prompt_ids)))
