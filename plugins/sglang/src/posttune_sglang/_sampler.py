"""A sampler for SGLang: draws belong to a request's seed, log-probabilities to what was drawn from."""

from __future__ import annotations

from typing import Any

import torch
from posttune.engines.drawing import invert, truncate, uniforms_at
from sglang.srt.layers.sampler import Sampler


class SeededSampler(Sampler):  # type: ignore[misc]
    """SGLang's sampler, whose draws are a function of (seed, place in the sequence) alone."""

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """Next token of each row, int32 [R]; writes its log-probability into ``logits_output``."""
        found: torch.Tensor = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        logits = found.float()
        if sampling_info.is_all_greedy:
            tokens, logp = logits.argmax(-1), logits.log_softmax(-1) if return_logprob else logits
        else:
            logits = logits / sampling_info.temperatures
            if sampling_info.need_top_k_sampling or sampling_info.need_top_p_sampling:
                logits = truncate(logits, sampling_info.top_ks, sampling_info.top_ps)
            logp = logits.log_softmax(-1)
            tokens = invert(logp.exp(), uniforms_at(sampling_info.sampling_seed, positions.long()))
        if return_logprob:
            self.output_logprob_processor.compute_logprobs(
                logp, top_logprobs_nums, token_ids_logprobs, tokens
            ).write_output_to(logits_output)
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens.to(torch.int32)
