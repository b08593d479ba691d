"""A scalar head on a language model: what reward models and critics are.

Both are transformers' sequence-classification models with one label, so that a reward model is a folder
that `AutoModelForSequenceClassification` loads, and a critic can start from one.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from posttune.errors import ModelError

HEAD = "score"
LABEL = "reward"


class ScalarHead(nn.Linear):
    """A linear head that computes in the type of its own weight, whatever the model's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Scalars of hidden states: [..., H] to [..., 1]."""
        return functional.linear(input.to(self.weight.dtype), self.weight, self.bias)


def find_head(model: nn.Module) -> nn.Linear | None:
    """The head of a decoder with one label; None where the model has another kind of head, or none."""
    head = getattr(model, HEAD, None)
    return head if isinstance(head, nn.Linear) and head.out_features == 1 else None


def check_scalar(model: PreTrainedModel, *, who: str) -> nn.Linear:
    """The head. Raises `ModelError` for a model that gives no scalar per token."""
    head = find_head(model)
    if head is not None:
        return head
    labels = model.config.num_labels
    what = f"{type(model).__name__} has no linear head called {HEAD!r} over every token"
    if labels != 1:
        what = f"it is a classifier of {labels} labels, not of one"
    raise ModelError(what, who=who, fix="start from a language model, or from a reward model with one label")


def add_head(model: PreTrainedModel, *, who: str, seed: int, std: float | None = None) -> PreTrainedModel:
    """A language model with a scalar head in the place of its vocabulary projection, in eval mode.

    The weights are taken over, not copied: do not use ``model`` afterwards. The head is drawn from
    N(0, std^2) with ``seed``; std defaults to 1 / sqrt(hidden + 1) (Stiennon et al. 2020,
    arXiv:2009.01325). Raises `ModelError` where transformers has no such form of the architecture.
    """
    config = model.config
    config.id2label, config.label2id = {0: LABEL}, {LABEL: 0}
    config.problem_type = "regression"  # pipelines then show the score itself, not its sigmoid
    made = _shell(config, model, who)
    config.architectures = [type(made).__name__]
    head = check_scalar(made, who=who)
    body = model.base_model
    example = next(body.parameters())
    setattr(made, HEAD, _new_head(head, example, seed, std))
    setattr(made, made.base_model_prefix, body)
    made.config = config
    cast(Any, made).generation_config = None
    made.eval()
    return made


def _shell(config: PretrainedConfig, model: PreTrainedModel, who: str) -> PreTrainedModel:
    """The sequence-classification form of the architecture, without any memory for its weights."""
    try:
        with torch.device("meta"):
            made = cast(PreTrainedModel, AutoModelForSequenceClassification.from_config(config))
    except Exception as error:  # each architecture fails in its own way
        raise _no_form(model, who, str(error).partition("\n")[0][:200]) from error
    if type(made.base_model) is not type(model.base_model):
        raise _no_form(model, who, f"it stands on {type(made.base_model).__name__}")
    return made


def _no_form(model: PreTrainedModel, who: str, why: str) -> ModelError:
    return ModelError(
        f"transformers has no fitting sequence-classification form of {type(model).__name__}: {why}",
        who=who,
        fix="choose another architecture, such as llama or qwen2",
    )


def _new_head(like: nn.Linear, example: torch.Tensor, seed: int, std: float | None) -> ScalarHead:
    size = like.in_features
    head = ScalarHead(size, 1, bias=like.bias is not None, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head.weight.normal_(0.0, (size + 1) ** -0.5 if std is None else std, generator=generator)
        if head.bias is not None:
            head.bias.zero_()
    return head.to(example.device, example.dtype)


def float_head(model: PreTrainedModel) -> None:
    """Let the head be float32 and trainable, as adapters are, in a model of any type."""
    old = cast(nn.Linear, getattr(model, HEAD))
    head = ScalarHead(old.in_features, 1, bias=old.bias is not None, device=old.weight.device)
    head.load_state_dict(old.state_dict())
    setattr(model, HEAD, head)


def choose_padding(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> None:
    """Give tokenizer and configuration a padding token other than the end of a sequence, if there is one.

    transformers scores the last token that is not padding: were that the end of the sequence, it would
    look one token too early. Where no special token serves, the configuration gets none, so that
    transformers takes single sequences (rightly) and refuses batches.
    """
    ends = {tokenizer.eos_token_id, *_as_set(getattr(config.get_text_config(), "eos_token_id", None))}
    found = next((number for number in _candidates(tokenizer) if number not in ends), None)
    if found is not None and found != tokenizer.pad_token_id:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(found)
    config.pad_token_id = found
    config.get_text_config().pad_token_id = found


def _candidates(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    named: list[Any] = [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id]
    added = [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]
    return [number for number in (*named, *sorted(added)) if number is not None]


def _as_set(value: int | list[int] | None) -> set[int]:
    return set() if value is None else {value} if isinstance(value, int) else set(value)
