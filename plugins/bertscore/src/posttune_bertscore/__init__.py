"""BERTScore (Zhang et al. 2020, arXiv:1904.09675) as a reward: how alike response and reference are.

Every token counts by its most similar one in the other text. Equal to the authors' package bert-score,
without its rescaling by a baseline.
"""

import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from posttune import hookimpl
from posttune.types import Needs, Sample
from pydantic import BaseModel, Field


class BertScore:
    """Scores a response by its most similar reference; 0 for an empty text, None without a reference."""

    class Config(BaseModel, extra="forbid"):
        """Options of the reward."""

        model: str = Field(description="Folder of an encoder that transformers loads.")
        measure: Literal["precision", "recall", "f1"] = Field("f1", description="What the score is.")
        layer: int = Field(-1, description="Layer of the embeddings: 0 the input's, -1 the last.")
        idf: bool = Field(False, description="Weigh tokens by their rarity among the batch's references.")
        batch_size: int = Field(64, gt=0, description="Pairs of one forward pass.")
        device: str = Field("cpu", description="Device of the encoder.")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def reward_needs(self) -> Needs:
        """The references, and a device where one is named."""
        return Needs(reference=True, device=self.config.device != "cpu")

    @hookimpl
    def reward_score(self, samples: Sequence[Sample]) -> list[float | None]:
        """The measure of each sample, at most 1."""
        golds = [[s.reference] if isinstance(s.reference, str) else s.reference or [] for s in samples]
        pairs = [(s.response, gold) for s, some in zip(samples, golds, strict=True) for gold in some]
        scores = compare(self.config, [text for pair in pairs for text in pair])
        return [max((next(scores) for _ in some), default=None) for some in golds]


@functools.lru_cache(maxsize=2)
def load(folder: str, device: str) -> tuple[Any, Any]:
    """Tokenizer and encoder, once in a process."""
    from transformers import AutoModel, AutoTokenizer

    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).float().eval().to(device)


def compare(config: BertScore.Config, texts: list[str]) -> Iterator[float]:
    """Score pairs of texts: P responses, each followed by its reference."""
    import torch

    tokenizer, model = load(config.model, config.device)
    limit = min(tokenizer.model_max_length, model.config.max_position_embeddings)
    # A lone surrogate is valid in a str, but not in UTF-8, which the tokenizer reads.
    clean = [text.strip().encode("utf-8", "replace").decode() for text in texts]
    rows = tokenizer(clean, truncation=True, max_length=limit)
    if cut := sum(bool(row.overflowing) for row in rows.encodings):
        logging.getLogger(__name__).warning("bertscore: cut %d texts to %d tokens", cut, limit)
    ids, size = rows.input_ids, 2 * config.batch_size
    seen = torch.LongTensor([token for row in ids[1::2] for token in set(row)])
    # The rarity of each token of the vocabulary; 1 where idf is off.
    weight = ((len(ids) / 2 + 1) / (seen.bincount(minlength=len(tokenizer)) + 1)).log() ** config.idf
    weight[[*tokenizer("").input_ids, tokenizer.pad_token_id]] = 0  # they can be matched, but do not count
    for start in range(0, len(ids), size):
        batch = tokenizer.pad({"input_ids": ids[start : start + size]}, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**batch.to(config.device), output_hidden_states=True).hidden_states[config.layer]
        unit = torch.nn.functional.normalize(hidden * batch.attention_mask[..., None], dim=-1)  # [2 P, T, H]
        near = (unit[::2] @ unit[1::2].mT).relu().cpu()  # [P, T of the responses, T of the references]
        share = torch.nn.functional.normalize(weight[batch.input_ids.cpu()], p=1, dim=1)  # sums to 1, or 0
        precision, recall = (near.amax(2) * share[::2]).sum(1), (near.amax(1) * share[1::2]).sum(1)
        measures = {"precision": precision, "recall": recall, "f1": 2 / (1 / precision + 1 / recall)}
        yield from torch.where(measures["f1"] > 0, measures[config.measure], 0).tolist()
