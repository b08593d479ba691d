"""Answers of a model to a few prompts, through a rollout backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttune.config.models import ModelConfig, PluginRef, SamplingConfig
from posttune.data.records import RowError
from posttune.data.templates import resolve_template
from posttune.data.tokenize import Encoder
from posttune.errors import DataError, ModelError
from posttune.facade import build_rollout
from posttune.models.load import LoadedModel, load_model
from posttune.rollout.requests import make_requests, make_sampling, response_texts
from posttune.types import RolloutContext


@dataclass(frozen=True)
class Answer:
    """One answer to one prompt."""

    prompt: str
    index: int  # of the samples of one prompt
    text: str
    finish_reason: str
    tokens: int
    logprob: float | None  # of the whole answer, natural log, under the sampling distribution


def answer(
    model: ModelConfig,
    path: Path,
    prompts: Sequence[str],
    sampling: SamplingConfig,
    *,
    template: str = "auto",
    backend: str = "hf",
    seed: int = 0,
    device: str = "cpu",
) -> list[Answer]:
    """Answer every prompt ``sampling.n`` times, prompt by prompt.

    ``template``: auto (the tokenizer's chat template where it has one), none, or a Jinja file.
    Raises `ModelError` and `DataError`.
    """
    loaded = load_model(model, path, seed=seed, device=device)
    ids = _encode(loaded, prompts, template)
    longest = max(len(each) for each in ids) + sampling.max_new_tokens
    _check_length(loaded, longest)
    asked = make_sampling(sampling, loaded.eos_ids)
    requests = make_requests([str(number) for number in range(len(prompts))], ids, seed=seed)
    with build_rollout(PluginRef(name=backend)) as engine:
        engine.start(
            RolloutContext(
                model_path=loaded.source,
                tokenizer=loaded.tokenizer,
                dtype=model.dtype,
                device=device,
                seed=seed,
                max_length=longest,
                live_model=loaded.model,
            )
        )
        completions = engine.generate(requests, asked)
    texts = response_texts(completions, loaded.tokenizer)
    return [
        Answer(
            prompt=prompts[int(completion.request_id)],
            index=completion.index,
            text=text,
            finish_reason=completion.finish_reason,
            tokens=len(completion.token_ids),
            logprob=None if completion.logprobs is None else sum(completion.logprobs),
        )
        for completion, text in zip(completions, texts, strict=True)
    ]


def _encode(loaded: LoadedModel, prompts: Sequence[str], template: str) -> list[list[int]]:
    if not all(prompts):
        raise DataError("a prompt is empty", who="generate", fix="give one of at least a character")
    encoder = Encoder(loaded.tokenizer, resolve_template(template, loaded.tokenizer))
    found: list[list[int]] = []
    for prompt, row in zip(prompts, encoder.encode([{"prompt": text} for text in prompts]), strict=True):
        if isinstance(row, RowError):
            raise DataError(str(row), who=f"prompt {prompt!r}", fix="give another prompt")
        found.append(row.prompt_ids)
    return found


def _check_length(loaded: LoadedModel, longest: int) -> None:
    positions = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise ModelError(
            f"the longest prompt and its answer may take {longest} tokens, the model takes {positions}",
            who=f"model {loaded.source}",
            fix="lower --max-new-tokens",
        )
