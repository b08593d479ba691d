"""A tokenised row, and how it is cut to a length without losing track of what is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from posttune.data.records import RowError

Truncation = Literal["refuse", "left", "right", "middle"]


@dataclass(frozen=True)
class Encoded:
    """A tokenised row. ``prompt_ids`` is a prefix of ``input_ids``."""

    prompt_ids: list[int]
    input_ids: list[int]
    loss_mask: list[bool]  # one a token of input_ids; False throughout where there is no response
    rejected_ids: list[int] | None = None  # prompt and rejected response
    cut: int = 0  # tokens that truncation took


def truncate(encoded: Encoded, max_length: int | None, side: Truncation, bos: int | None = None) -> Encoded:
    """At most ``max_length`` tokens, mask and prompt cut along with them.

    ``left`` drops the beginning (a BOS stays), ``right`` the end, ``middle`` what lies between two
    halves. Of preference data ``left`` and ``middle`` cut the prompt, equally for both answers, down
    to half the limit; then the answers lose their ends. Raises `RowError` where cutting is refused or
    would leave nothing to train.
    """
    longest = max(len(encoded.input_ids), len(encoded.rejected_ids or ()))
    if max_length is None or longest <= max_length:
        return encoded
    if side == "refuse":
        raise RowError(f"{longest} tokens, more than the limit of {max_length}")
    rejected = encoded.rejected_ids
    if rejected is None or side == "right":
        keep = _kept(encoded.input_ids, max_length, side, bos)
        rejected = rejected and rejected[:max_length]
    else:
        prompt = len(encoded.prompt_ids)
        room = max(max_length - (longest - prompt), max_length // 2)
        context = _kept(encoded.prompt_ids, room, side, bos)
        keep = [*context, *range(prompt, len(encoded.input_ids))][:max_length]
        rejected = [*(rejected[place] for place in context), *rejected[prompt:]][:max_length]
    return _only(encoded, keep, rejected, longest - max_length)


def _only(encoded: Encoded, keep: list[int], rejected: list[int] | None, cut: int) -> Encoded:
    """The row with the tokens at these places."""
    ids = [encoded.input_ids[place] for place in keep]
    mask = [encoded.loss_mask[place] for place in keep]
    if mask and mask[0]:
        mask[0] = False  # nothing stands before it any more that could predict it
    if any(encoded.loss_mask) and not any(mask):
        raise RowError(f"no response is left after truncation to {len(keep)} tokens")
    prompt = sum(place < len(encoded.prompt_ids) for place in keep)
    return Encoded(ids[:prompt], ids, mask, rejected, cut)


def _kept(ids: Sequence[int], limit: int, side: Truncation, bos: int | None) -> list[int]:
    """The places that stay."""
    size = len(ids)
    if size <= limit:
        return list(range(size))
    if side == "right":
        return list(range(limit))
    head = limit // 2 if side == "middle" else int(bos is not None and ids[0] == bos and limit > 1)
    return [*range(head), *range(size - (limit - head), size)]
