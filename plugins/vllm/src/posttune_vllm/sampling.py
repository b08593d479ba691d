"""From core's sampling to vLLM's, the same for the engine and the server."""

from __future__ import annotations

from typing import Any

from posttune.types import Sampling


def parameters(sampling: Sampling, logprobs: bool) -> dict[str, Any]:
    """Fields of SamplingParams, none left to the model's generation config.

    The EOS set is given as stop tokens, with the model's own ignored, so that exactly these end an answer.
    Stop strings are looked for in the text with special tokens, as core does.
    """
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
