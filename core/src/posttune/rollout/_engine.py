"""The `hf` engine behind its hooks: whose weights, which limits, which requests are refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from posttune.config.models import DType, ModelConfig
from posttune.distributed.tensors import least
from posttune.errors import DataError, RunError
from posttune.models.load import load_model
from posttune.models.lora import inner_model
from posttune.rollout import _weights
from posttune.rollout._generate import generate
from posttune.rollout._plan import Limits
from posttune.types import BackendInfo, Completion, Request, RolloutContext, Sampling

CPU_CACHE_MB = 2048
FREE_SHARE = 0.5  # of a GPU's free memory, where nothing else is said
LOGITS_COPIES = 4  # logits, scaled, log-probabilities and probabilities live at the same time


class Engine:
    """A model that generates, and the version of its weights."""

    def __init__(self, context: RolloutContext, cache_mb: int | None) -> None:
        self._context = context
        self._cache_mb = cache_mb
        self._version = 0
        self._known: dict[str, torch.Size] | None = None
        self._live = context.live_model is not None
        self._tokenizer = context.tokenizer
        self._model = self._own_copy() if context.live_model is None else context.live_model

    @property
    def info(self) -> BackendInfo:
        """What the engine can do."""
        dtype = str(inner_model(self._model).dtype).removeprefix("torch.")
        details = {"weights": "the trainer's module" if self._live else "a copy", "dtype": dtype}
        return BackendInfo(name="hf", logprobs="processed", shares_weights=self._live, details=details)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Answers, request-major. Raises DataError for an empty prompt and for one that is too long."""
        for request in requests:
            self._check(request, sampling)
        limits = self._limits()
        return generate(self._model, self._tokenizer, requests, sampling, limits, self._version)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int, adapter: str | None) -> None:
        """Take new weights, all or none. Those of a live module are there already."""
        if adapter is not None:
            raise RunError(
                f"load_weights: adapter {adapter!r} cannot be taken by itself",
                who=_weights.WHO,
                fix="hand over the merged weights",
            )
        if not self._live:
            _weights.load(self._model, tensors)
        else:
            if self._known is None:
                self._known = _weights.known_shapes(self._model)
            _weights.check_names((name for name, _ in tensors), self._known)
        self._version = version

    def checksums(self) -> dict[str, str]:
        """SHA-256 by Hugging Face name."""
        return _weights.checksums(self._model)

    def _own_copy(self) -> PreTrainedModel:
        context = self._context
        if context.model_path is None:
            raise RunError(
                "neither a model folder nor a live model was given",
                who=_weights.WHO,
                fix="give one of the two",
            )
        config = ModelConfig(path=str(context.model_path), dtype=cast(DType, context.dtype))
        loaded = load_model(config, context.model_path, seed=context.seed, device=context.device)
        if self._tokenizer is None:
            self._tokenizer = loaded.tokenizer
        return loaded.model.requires_grad_(False)

    def _check(self, request: Request, sampling: Sampling) -> None:
        who, length = f"request {request.id!r}", len(request.prompt_ids)
        if length == 0:
            raise DataError("its prompt has no tokens", who=who, fix="remove empty prompts from the data")
        if length + sampling.max_new_tokens > self._context.max_length:
            raise DataError(
                f"its prompt of {length} tokens and max_new_tokens {sampling.max_new_tokens} exceed the "
                f"longest sequence, {self._context.max_length} tokens",
                who=who,
                fix="shorten or remove the prompt, or lower rollout.sampling.max_new_tokens",
            )

    def _limits(self) -> Limits:
        config = inner_model(self._model).config.get_text_config()
        per_token = _cache_bytes_per_token(config, self._model.dtype)
        per_row = LOGITS_COPIES * 4 * int(config.vocab_size)
        budget = least(self._model, self._budget())
        return Limits(self._context.resources.max_sequences, budget, per_token, per_row)

    def _budget(self) -> int:
        if self._cache_mb is not None:
            return self._cache_mb << 20
        device = torch.device(self._context.device)
        if device.type != "cuda":
            return CPU_CACHE_MB << 20
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        share = self._context.resources.memory_share
        return int(min(free, share * total) if share is not None else FREE_SHARE * free)


def _cache_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers; an estimate for unusual architectures."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * head_dim * dtype.itemsize)
