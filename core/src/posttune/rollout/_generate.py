"""Generation with a transformers model: batches, one prefill per prompt, the decoding loop."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from posttune.distributed.tensors import whole
from posttune.engines.drawing import uniforms
from posttune.models.lora import inner_model
from posttune.rollout._plan import Limits, Span, plan
from posttune.rollout._sampling import draw
from posttune.rollout._stop import StopStrings
from posttune.types import Completion, Request, Sampling

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

DROP_SHARE = 1 / 16  # finished rows leave the batch once they are this part of it: leaving copies the cache


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    requests: Sequence[Request],
    sampling: Sampling,
    limits: Limits,
    version: int,
) -> list[Completion]:
    """Answers every request ``sampling.n`` times; request-major.

    In float32 a completion does not depend on the batch that it ran in.
    """
    stop = StopStrings(tokenizer, sampling.stop)
    answers: dict[tuple[int, int], Completion] = {}
    with whole(model), for_generation(model):
        decoder = _Decoder(model)
        for spans in plan(requests, sampling.n, sampling.max_new_tokens, limits):
            batch = _Batch(decoder, requests, spans, sampling, stop)
            batch.run()
            answers.update(batch.completions(version))
    return [answers[i, j] for i in range(len(requests)) for j in range(sampling.n)]


@contextmanager
def for_generation(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode without gradients and their checkpointing, which disables the cache; then all as before."""
    training = [module for module in model.modules() if module.training]
    checkpointing = [m for m in model.modules() if m.__dict__.get("gradient_checkpointing") is True]
    try:
        model.eval()
        for module in checkpointing:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        # Not inference_mode: what a live model caches in its forward must stay usable in training.
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
        for module in checkpointing:
            module.gradient_checkpointing = True  # type: ignore[assignment]


class _Decoder:
    """One forward pass that yields the logits after each row's last token."""

    def __init__(self, model: PreTrainedModel) -> None:
        base = inner_model(model)
        accepted = inspect.signature(base.forward).parameters
        self._model = model
        self._cache = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5.2x
        self._extra = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._positions = "position_ids" in accepted
        self.config = base.config
        self.device = cast(torch.device, base.get_input_embeddings().weight.device)

    def __call__(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Cache) -> Tensor:
        """ids, positions int64 [R, T], mask int64 [R, past + T] or None -> logits [R, V]."""
        arguments: dict[str, Any] = {self._cache: cache, **self._extra}
        if self._positions:
            arguments["position_ids"] = positions
        output = self._model(
            input_ids=ids, attention_mask=mask, use_cache=True, return_dict=True, **arguments
        )
        logits: Tensor = output.logits[:, -1]
        return logits


@dataclass
class _Live:
    """The rows that are still in the batch, R of them."""

    rows: Tensor  # int64 [R], places in the batch's result buffers
    active: Tensor  # bool [R]; False: finished, not yet dropped
    pad: Tensor  # int64 [R], left padding
    mask: Tensor | None  # int64 [R, longest + max_new_tokens]; None where nothing is padded
    cache: Cache

    def keep(self, chosen: Tensor) -> None:
        self.rows, self.active, self.pad = self.rows[chosen], self.active[chosen], self.pad[chosen]
        self.mask = self.mask[chosen] if self.mask is not None else None
        self.cache.batch_select_indices(chosen)


class _Batch:
    """Generates the samples of some spans together. Prompts are padded on the left."""

    def __init__(
        self,
        decoder: _Decoder,
        requests: Sequence[Request],
        spans: Sequence[Span],
        sampling: Sampling,
        stop: StopStrings,
    ) -> None:
        self._decoder, self._sampling, self._stop = decoder, sampling, stop
        self._prompts = [requests[span.position].prompt_ids for span in spans]
        self._counts = [span.count for span in spans]
        self._keys = [(span.position, span.first + k) for span in spans for k in range(span.count)]
        self._ids = [requests[position].id for position, _ in self._keys]
        seeds = [requests[position].seed for position, _ in self._keys]
        rows, length, device = len(self._keys), sampling.max_new_tokens, decoder.device
        self._uniforms = uniforms(seeds, [index for _, index in self._keys], length).to(device)
        self._eos = torch.tensor(sorted(sampling.eos_ids), dtype=torch.int64, device=device)
        self._tokens = torch.zeros(rows, length, dtype=torch.int64, device=device)
        self._logps = torch.zeros(rows, length, dtype=torch.float32, device=device)
        self._lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self._stopped = torch.zeros(rows, dtype=torch.bool, device=device)

    def run(self) -> None:
        """Decodes until every row has stopped or has its last token."""
        logits, live, longest = self._prefill()
        for step in range(self._sampling.max_new_tokens):
            tokens, logp = draw(logits, self._uniforms[live.rows, step], self._sampling)
            self._record(live, step, tokens, logp)
            remaining = int(live.active.sum())  # the one wait for the device of a step
            if remaining == 0 or step + 1 == self._sampling.max_new_tokens:
                return
            if remaining <= (1 - DROP_SHARE) * live.active.numel():
                chosen = live.active.nonzero()[:, 0]
                tokens = tokens[chosen]
                live.keep(chosen)
            past = longest + step
            mask = live.mask[:, : past + 1] if live.mask is not None else None
            logits = self._decoder(tokens[:, None], mask, (past - live.pad)[:, None], live.cache)

    def completions(self, version: int) -> dict[tuple[int, int], Completion]:
        """Results by (request position, sample index)."""
        lengths, stopped = self._lengths.tolist(), self._stopped.tolist()
        longest = max(lengths)
        tokens, logps = self._tokens[:, :longest].tolist(), self._logps[:, :longest].tolist()
        wanted = self._sampling.logprobs
        return {
            key: Completion(
                request_id=self._ids[row],
                index=key[1],
                token_ids=tuple(tokens[row][: lengths[row]]),
                logprobs=tuple(logps[row][: lengths[row]]) if wanted else None,
                finish_reason="stop" if stopped[row] else "length",
                weight_version=version,
            )
            for row, key in enumerate(self._keys)
        }

    def _prefill(self) -> tuple[Tensor, _Live, int]:
        """Each prompt once; then its logits and cache are repeated for its samples."""
        from transformers import DynamicCache

        longest = max(len(prompt) for prompt in self._prompts)
        device = self._decoder.device
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in self._prompts], device=device)
        pad = torch.tensor([longest - len(p) for p in self._prompts], device=device)
        places = torch.arange(longest + self._sampling.max_new_tokens, device=device)
        padded = any(len(prompt) < longest for prompt in self._prompts)
        mask = (places[None, :] >= pad[:, None]).long() if padded else None
        positions = (places[None, :longest] - pad[:, None]).clamp_(min=0)
        cache = DynamicCache(config=self._decoder.config)
        logits = self._decoder(ids, mask[:, :longest] if mask is not None else None, positions, cache)
        prompts = torch.arange(len(self._prompts), device=device)
        repeat = prompts.repeat_interleave(torch.tensor(self._counts, device=device))
        cache.batch_select_indices(repeat)
        rows = torch.arange(len(self._keys), device=device)
        active = torch.ones_like(rows, dtype=torch.bool)
        live = _Live(rows, active, pad[repeat], mask[repeat] if mask is not None else None, cache)
        return logits[repeat], live, longest

    def _record(self, live: _Live, step: int, tokens: Tensor, logp: Tensor) -> None:
        """Stores a token of each active row, and marks the rows that it ended."""
        self._tokens[live.rows, step] = tokens
        self._logps[live.rows, step] = logp
        self._lengths[live.rows] += live.active
        ended = torch.isin(tokens, self._eos)
        if self._stop:
            ended |= self._stop_strings(live, step)
        self._stopped[live.rows] |= ended & live.active
        live.active &= ~ended

    def _stop_strings(self, live: _Live, step: int) -> Tensor:
        so_far = self._tokens[live.rows, : step + 1].tolist()
        active = live.active.tolist()
        found = [on and self._stop.finished(ids) for on, ids in zip(active, so_far, strict=True)]
        return torch.tensor(found, dtype=torch.bool, device=live.rows.device)
