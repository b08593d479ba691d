"""The next token of each row of a batch, and its log-probability."""

from __future__ import annotations

from torch import Tensor

from posttune.engines.drawing import invert, truncate
from posttune.types import Sampling


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Next token of each row, int64 [R], and its natural log-probability, float32 [R].

    ``logits`` [R, V], ``uniform`` float32 [R, 2]. Log-probabilities are of the distribution that was
    sampled from: after temperature, top-k and top-p, in that order. A greedy answer (temperature 0)
    has none, so there they are of the model's own distribution, at temperature 1.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    logp = truncate(logits, sampling.top_k, sampling.top_p).log_softmax(-1)
    tokens = invert(logp.exp(), uniform)
    return tokens, logp.gather(-1, tokens[:, None])[:, 0]
