"""Stop strings: has the newest token of a completion finished one?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from posttune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopStrings:
    """Looks for stop strings in the decoded tail of a completion.

    The tail is as long as the longest stop string can be (one token is at least one byte), and a
    little more, since the first character of a tail may be cut. Tokens after the one that
    completes a stop string are never drawn; that token itself is kept whole.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, strings: Sequence[str]) -> None:
        if strings and tokenizer is None:
            raise UserError(
                "stop strings need a tokenizer, and this rollout has none",
                who="rollout_backend 'hf'",
                fix="give the model a tokenizer, or remove rollout.sampling.stop",
            )
        if "" in strings:
            raise UserError(
                "an empty stop string would end every completion at once",
                who="rollout.sampling.stop",
                fix="remove the empty string",
            )
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._tail = max((len(text.encode()) for text in strings), default=0) + 4

    def __bool__(self) -> bool:
        return bool(self._strings)

    def finished(self, ids: Sequence[int]) -> bool:
        """Whether the completion ``ids`` holds a stop string at its end."""
        assert self._tokenizer is not None
        text = self._tokenizer.decode(list(ids[-self._tail :]), skip_special_tokens=False)
        return any(string in text for string in self._strings)
