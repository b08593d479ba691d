"""Text to token ids, and which of them are trained: the response and its end of sequence, no more.

The parts of a sequence are tokenised apart, so that a prompt's ids are the same whether a rollout
continues them or a response stands behind them, and the mask follows from lengths alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from posttune.data.encoded import Encoded, Truncation, truncate
from posttune.data.piecewise import FlatIds, word_table
from posttune.data.records import RowError
from posttune.data.templates import Piece, Renderer, Template
from posttune.data.token_columns import Frame, TokenColumns, token_columns
from posttune.errors import DataError, ModelError
from posttune.types import Record

if TYPE_CHECKING:
    import pyarrow as pa
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

PROBE = " The  capital\n\tof France's <s> naïve 日本 🎉 1234567 </s> </w>\r\n"


class Encoder:
    """Tokenises rows with one tokenizer and one template, to at most ``max_length`` tokens.

    Raises `ModelError` for a tokenizer without an end-of-sequence token, and `DataError` for messages
    where no template applies.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: Template,
        max_length: int | None = None,
        truncation: Truncation = "refuse",
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ModelError(
                "has no end-of-sequence token, so a model could not learn to stop",
                who=f"tokenizer {tokenizer.name_or_path}",
                fix="set eos_token in its tokenizer_config.json",
            )
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._truncation: Truncation = truncation
        self._eos = int(tokenizer.eos_token_id)
        self._bos = tokenizer.bos_token_id
        self._prefix = _prefix(tokenizer)
        self._renderer = Renderer(template, tokenizer) if template.source is not None else None
        self._joins = _joins_cleanly(tokenizer)
        self._backend = _plain_backend(tokenizer)
        self._words = word_table(self._backend) if self._backend is not None else None

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[Encoded | RowError]:
        """Each row's ids, or why it has none. One call of the tokenizer for all of them."""
        plans = [self._plan(row) for row in rows]
        parts = [sides for sides in plans if not isinstance(sides, RowError)]
        ids = iter(self._tokenize(list(chain.from_iterable(parts))))
        return [
            plan if isinstance(plan, RowError) else self._assemble([(side, next(ids)) for side in plan])
            for plan in plans
        ]

    @property
    def has_columns(self) -> bool:
        """Whether rows can be encoded by columns."""
        return self._words is not None and self._renderer is None and self._joins

    def columns(self, roles: Mapping[str, pa.StringArray]) -> TokenColumns | None:
        """The same for rows without messages, by columns; None where they must be looked at one by one."""
        if self._words is None or not self.has_columns:
            return None
        texts = {role: self._words.encode_flat(column.to_pylist()) for role, column in roles.items()}
        answer = texts.get("text", texts.get("response"))
        prompt = texts.get("prompt", FlatIds.none(len(next(iter(roles.values())))))
        found = token_columns(prompt, answer, Frame(self._prefix, self._bos, self._eos))
        if found is not None and self._max_length is not None and found.total.max() > self._max_length:
            return None
        return found

    def _plan(self, row: Mapping[str, Any]) -> list[list[Piece]] | RowError:
        """The pieces of the row's sequence; for preference data, also of the rejected one."""
        try:
            answers = [role for role in ("chosen", "rejected") if row.get(role) is not None]
            return [self._pieces(row, role) for role in answers or ["response"]]
        except RowError as problem:
            return problem

    def _pieces(self, row: Mapping[str, Any], role: str) -> list[Piece]:
        if row.get("text") is not None and row.get("prompt") is None:
            return [Piece("", False), Piece(row["text"], True)]
        messages = row.get("messages")
        answer = row.get(role)
        if messages and role != "response":
            messages = [*messages, {"role": "assistant", "content": answer}]
        if self._renderer is not None:
            turns = messages or _as_messages(row["prompt"], answer)
            return self._renderer.pieces(turns, row.get("tools"))
        if messages:
            raise DataError(
                "messages need a chat template: the tokenizer has none, or the template is none",
                fix="give the path of a Jinja template (--template PATH)",
            )
        return [Piece(row["prompt"], False), *([Piece(answer, True)] if answer is not None else [])]

    def _tokenize(self, sequences: Sequence[list[Piece]]) -> list[list[list[int]]]:
        """The ids of every piece of every sequence."""
        if self._joins:
            flat = self._call([piece.text for pieces in sequences for piece in pieces])
            ids = iter(flat)
            return [[next(ids) for _ in pieces] for pieces in sequences]
        return [self._by_offsets(pieces) for pieces in sequences]

    def _call(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        if self._words is not None:
            return self._words.encode(texts)
        if self._backend is not None:
            return [found.ids for found in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        found = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids: list[list[int]] = found["input_ids"]
        return ids

    def _by_offsets(self, pieces: list[Piece]) -> list[list[int]]:
        """For tokenizers that put a space before every text: the whole text, cut at the pieces' ends."""
        whole = "".join(piece.text for piece in pieces)
        found = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids: list[list[int]] = [[] for _ in pieces]
        place, end = 0, len(pieces[0].text)
        for token, (_, stop) in zip(found["input_ids"], found["offset_mapping"], strict=True):
            while stop > end and place < len(pieces) - 1:
                place += 1
                end += len(pieces[place].text)
            ids[place].append(token)
        return ids

    def _assemble(self, sequences: list[tuple[list[Piece], list[list[int]]]]) -> Encoded | RowError:
        prompt, ids, mask = self._join(*sequences[0])
        if any(piece.trained for piece in sequences[0][0]) != any(mask) or not ids:
            return RowError("nothing to train: its text has no token")
        rejected = self._join(*sequences[1])[1] if len(sequences) > 1 else None
        try:
            whole = Encoded(prompt, ids, mask, rejected)
            return truncate(whole, self._max_length, self._truncation, self._bos)
        except RowError as problem:
            return problem

    def _join(self, pieces: list[Piece], ids: list[list[int]]) -> tuple[list[int], list[int], list[bool]]:
        """(prompt ids, all ids, mask) of one sequence, its special tokens in place."""
        start = self._prefix if self._renderer is None else []
        first = next((part for part in ids if part), [])
        if self._bos is not None and first[:1] == [self._bos]:
            start = [token for token in start if token != self._bos]
        parts = [[*start, *ids[0]], *ids[1:]]
        answered = len(pieces) > 1
        if answered and parts[-1][-1:] != [self._eos]:
            parts[-1] = [*parts[-1], self._eos]
        mask = [piece.trained for piece, part in zip(pieces, parts, strict=True) for _ in part]
        if mask and mask[0]:
            mask[0] = False  # nothing stands before the first token that could predict it
        prompt = list(chain.from_iterable(parts[:-1] if answered else parts))
        return prompt, list(chain.from_iterable(parts)), mask


def encode_record(
    record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, template: Template
) -> Encoded:
    """One row's ids. Raises `RowError` where it has none. For many rows use `Encoder`."""
    (found,) = Encoder(tokenizer, template).encode([record])
    if isinstance(found, RowError):
        raise found
    return found


def token_view(record: Record) -> dict[str, Any]:
    """What an `Encoder` reads of a record."""
    roles = ("prompt", "response", "chosen", "rejected", "messages", "text")
    return {**{role: getattr(record, role) for role in roles}, "tools": record.columns.get("tools")}


def token_meta(tokenizer: PreTrainedTokenizerBase, template: Template, path: object) -> dict[str, Any]:
    """What ``meta.json`` says about tokens."""
    about = {
        "path": str(path),
        "fingerprint": tokenizer_fingerprint(tokenizer),
        "eos_id": tokenizer.eos_token_id,
        "bos_id": tokenizer.bos_token_id,
        "size": len(tokenizer),
    }
    return {"tokenizer": about, "template": template.as_meta()}


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of what decides ids: vocabulary, rules, special tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else {"vocab": tokenizer.get_vocab()}
    for state in ("truncation", "padding"):  # set by whoever called the tokenizer last
        rules.pop(state, None)
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, _prefix(tokenizer)]
    text = json.dumps([rules, special, tokenizer.chat_template], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _as_messages(prompt: str, answer: str | None) -> list[dict[str, Any]]:
    turns = [{"role": "user", "content": prompt}]
    return turns if answer is None else [*turns, {"role": "assistant", "content": answer}]


def _prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that the tokenizer puts before a text: a BOS, or nothing."""
    bare = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True, verbose=False)["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return list(full[:start])
    return []


def _plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """The Rust tokenizer where calling it is all that the tokenizer does; it is a third faster alone."""
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    backend.no_truncation()
    backend.no_padding()
    theirs = tokenizer([PROBE], add_special_tokens=False, verbose=False)["input_ids"]
    ours = backend.encode_batch_fast([PROBE], add_special_tokens=False)
    return backend if [ours[0].ids] == theirs else None


def _joins_cleanly(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether texts tokenised apart join to the same text: not so where each gets a space in front."""
    if not tokenizer.is_fast:
        return True
    left, right = tokenizer(["x", "y"], add_special_tokens=False)["input_ids"]
    return bool(tokenizer.decode([*left, *right]) == "xy")
