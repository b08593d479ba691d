"""From core's sampling to SGLang's."""

from __future__ import annotations

from typing import Any

from posttune.types import Sampling


def parameters(sampling: Sampling, logprobs: bool) -> dict[str, Any]:
    """Fields of SamplingParams for all samples, none left to the model's generation config.

    ``samples`` and ``logprobs`` are this plugin's own. The EOS set is given as stop tokens; the folder that
    the engine reads names none of its own (``prepare``), so that exactly these end an answer. Stop strings
    are looked for in the text with special tokens, as core does.
    """
    fields = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_new_tokens": sampling.max_new_tokens,
        "min_new_tokens": 0,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(sampling.eos_ids),
        "ignore_eos": False,  # true would ignore the stop tokens too
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    return {"samples": sampling.n, "logprobs": logprobs, "fields": fields}
