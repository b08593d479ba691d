"""The reward `model`: the score of a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from posttune.config.models import Positive, Strict
from posttune.hookspecs import hookimpl
from posttune.types import Needs, Sample

if TYPE_CHECKING:
    from posttune.reward._model import Scorer


class ModelRewardConfig(Strict):
    """Which model, and how it runs."""

    path: str = Field(
        description="A sequence-classification model with one label: a folder, or a reward_model stage."
    )
    batch_size: Positive = Field(16, description="Answers of one forward pass.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of its weights; auto: as they are stored."
    )
    device: str = Field("auto", description="auto (a GPU where there is one), cpu, cuda, cuda:1 …")
    max_length: Positive | None = Field(
        None,
        description="Tokens of prompt and answer; the beginning is cut beyond. None: the model's positions.",
    )
    template: str = Field(
        "auto",
        description="auto (the chat template of its tokenizer, if any), none, or the path of a template.",
    )


class ModelReward:
    """The scalar that a reward model gives to the last token of a prompt with its answer.

    The text is joined and tokenised as in the model's own training: by the chat template of its
    tokenizer where it has one, with the end-of-sequence token behind the answer. The policy's tokens
    are not used: the two models may have different tokenizers. Every answer gets a number.
    """

    Config = ModelRewardConfig

    def __init__(self, config: ModelRewardConfig) -> None:
        self.config = config
        self._scorer: Scorer | None = None

    @hookimpl
    def reward_needs(self) -> Needs:
        """A device. Raises ModelError where the folder holds no reward model; reads no weights."""
        from posttune.reward._model import check

        check(self.config)
        return Needs(device=True)

    @hookimpl
    def reward_score(self, samples: Sequence[Sample]) -> list[float]:
        """One score a sample. The model is loaded at the first call."""
        from posttune.reward._model import load_scorer

        if self._scorer is None:
            self._scorer = load_scorer(self.config)
        return self._scorer.score(samples)
