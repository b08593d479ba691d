"""What a dataset looks like before anything is trained on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from posttune.config.models import PluginRef
from posttune.data.dataset import SampleDataset
from posttune.data.layout import TEXT_ROLES
from posttune.data.quality import ENTITIES, GARBLED, SPECIAL, TextCheck
from posttune.data.rejected import read_rejected
from posttune.data.retokenize import record_of
from posttune.data.statistics import Duplicates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttune.trainer.overfit import Overfit

EXAMPLES = 10
_EXCERPT = 80


@dataclass(frozen=True)
class Span:
    """A part of a rendered row: ``trained`` says whether the loss covers it."""

    text: str
    trained: bool


@dataclass(frozen=True)
class RenderedRow:
    """A row as the model will see it."""

    file: str
    row: int
    tokens: int | None  # None: not tokenised
    trained_tokens: int | None
    pieces: list[Span]


@dataclass(frozen=True)
class Oddity:
    """A text that may not be what its author wrote."""

    file: str
    row: int
    column: str
    codes: list[str]
    excerpt: str


@dataclass(frozen=True)
class Overlap:
    """How many rows of another dataset have a prompt that this one has too."""

    path: str
    rows: int
    of: int
    examples: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Lack:
    """A column that a reward needs and rows lack."""

    reward: str
    column: str
    rows: int  # without a value; all of them where there is no such column


@dataclass(frozen=True)
class Inspection:
    """The findings. ``columns`` says for each column how many rows have a value."""

    path: str
    rows: int
    tokenized: bool
    template: str
    columns: dict[str, int]
    missing: dict[str, int]
    lengths: dict[str, Any]
    garbled: dict[str, int]
    oddities: list[Oddity]
    duplicates: int
    rejected: int
    rejected_examples: list[dict[str, Any]]
    warnings: list[dict[str, Any]]
    overlap: Overlap | None
    samples: list[RenderedRow]
    lacking: list[Lack] = field(default_factory=list)
    overfit: Overfit | None = None


def inspect_dataset(
    dataset: SampleDataset,
    *,
    rows: int = 3,
    against: SampleDataset | None = None,
    rewards: Sequence[PluginRef] = (),
) -> Inspection:
    """Look at a converted dataset.

    ``against`` is another one whose prompts should not be in it; ``rewards`` are asked what they need.
    """
    meta = dataset.meta
    counts = {warning["code"]: warning["count"] for warning in meta["warnings"]}
    found = {code: counts[code] for code in (*GARBLED, ENTITIES, SPECIAL) if code in counts}
    tokenizer = _tokenizer(dataset)
    return Inspection(
        path=str(dataset.folder),
        rows=len(dataset),
        tokenized=dataset.is_tokenized,
        template=_template(meta["template"]),
        columns=dict(meta["columns"]),
        missing={name: n for name in dataset.columns if (n := dataset.missing(name))},
        lengths=meta["lengths"],
        garbled=found,
        oddities=list(_oddities(dataset, tokenizer)) if found else [],
        duplicates=meta["duplicates"],
        rejected=meta["rejected"],
        rejected_examples=read_rejected(dataset.folder)[:EXAMPLES],
        warnings=meta["warnings"],
        overlap=_overlap(dataset, against) if against is not None else None,
        samples=[_rendered(dataset, index, tokenizer) for index in range(min(rows, len(dataset)))],
        lacking=lacking(dataset, rewards) if rewards else [],
    )


def lacking(dataset: SampleDataset, rewards: Sequence[PluginRef]) -> list[Lack]:
    """What rewards need of the data and do not find. Loads the rewards."""
    from posttune.facade import build_rewards

    found = []
    for label, needs in build_rewards(list(rewards)).needs.items():
        for column in (*needs.columns, *(["reference"] if needs.reference else [])):
            if rows := dataset.missing(column):
                found.append(Lack(label, column, rows))
    return found


def _rendered(dataset: SampleDataset, index: int, tokenizer: PreTrainedTokenizerBase | None) -> RenderedRow:
    row, place = dataset[index], dataset.location(index)
    if tokenizer is None:
        return RenderedRow(place.file, place.row, None, None, _text_spans(row))
    pairs = zip(row["input_ids"], row["loss_mask"], strict=True)
    spans = [
        Span(str(tokenizer.decode([token for token, _ in run])), trained)
        for trained, run in groupby(pairs, key=lambda pair: pair[1])
    ]
    return RenderedRow(place.file, place.row, len(row["input_ids"]), sum(row["loss_mask"]), spans)


def _text_spans(row: dict[str, Any]) -> list[Span]:
    """A row that is not tokenised: what the loss would cover, without any template."""
    if row.get("messages"):
        return [
            Span(f"{message['role']}: {message.get('content') or ''}\n", message["role"] == "assistant")
            for message in row["messages"]
        ]
    roles = [role for role in TEXT_ROLES if row.get(role) is not None]
    return [Span(row[role], role != "prompt") for role in roles]


def _oddities(dataset: SampleDataset, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[Oddity]:
    """The first few texts of each sort of finding."""
    check = TextCheck(tokenizer.all_special_tokens if tokenizer is not None else ())
    seen: Counter[str] = Counter()
    for index in range(len(dataset)):
        record = record_of(dataset, index)
        texts = {role: getattr(record, role) for role in TEXT_ROLES}
        if record.messages:  # prompt and response are copies of their last turns
            texts = {f"message {n}": m.get("content") for n, m in enumerate(record.messages, start=1)}
            texts |= {role: getattr(record, role) for role in ("chosen", "rejected")}
        for column, text in texts.items():
            codes = [code for code in sorted(check(text or "")) if seen[code] < EXAMPLES]
            if codes:
                seen.update(codes)
                where = record.location
                yield Oddity(where.file, where.row, column, codes, _excerpt(text, check, codes[0]))


def _excerpt(text: str, check: TextCheck, code: str) -> str:
    """The first part of the text in which the finding lies."""
    for start in range(0, len(text), _EXCERPT // 2):
        part = text[start : start + _EXCERPT]
        if code in check(part):
            return part
    return text[:_EXCERPT]


def _overlap(dataset: SampleDataset, against: SampleDataset) -> Overlap:
    known = set(_prompts(dataset).digests().tolist())
    shared = [index for index, digest in enumerate(_prompts(against).digests().tolist()) if digest in known]
    places = [against.location(index) for index in shared[:3]]
    examples = [f"{place.file}:{place.row}" for place in places]
    return Overlap(str(against.folder), len(shared), len(against), examples)


def _prompts(dataset: SampleDataset) -> Duplicates:
    found = Duplicates()
    for batch in dataset.batches():
        for prompt, text in zip(batch.column("prompt"), batch.column("text"), strict=True):
            found.add(prompt.as_py(), text.as_py())
    return found


def _tokenizer(dataset: SampleDataset) -> PreTrainedTokenizerBase | None:
    if not dataset.is_tokenized:
        return None
    from posttune.models.tokenizer import load_tokenizer

    return load_tokenizer(dataset.folder)


def _template(recorded: dict[str, Any]) -> str:
    return f"{recorded['choice']} ({'applied' if recorded['applied'] else 'not applied'})"


def visible(text: str) -> str:
    """The text with its control characters escaped: a terminal must not obey a dataset."""
    return "".join(char if char in "\n\t" or char.isprintable() else _escaped(char) for char in text)


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
