"""The result of an evaluation, and the shapes in which it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posttune.evaluate.statistics import halvings, mean, pass_at_k, wilson
from posttune.reward.scoring import scalar
from posttune.types import Sample, Score

if TYPE_CHECKING:
    import pyarrow as pa

RIGHT = 0.5
"""An answer is right where the first reward gives it at least this."""


@dataclass(frozen=True)
class Answer:
    """What counts of one answer. Plain data: it travels between processes."""

    prompt: int  # row of the dataset
    scores: Mapping[str, float | None]  # by label of the reward, the deciding one first
    tokens: int
    truncated: bool
    by: Mapping[str, str] = field(default_factory=dict)  # value of each column to break down by

    @property
    def score(self) -> float | None:
        """What the deciding reward gave."""
        return next(iter(self.scores.values()))


@dataclass(frozen=True)
class Accuracy:
    """Of some prompts. The interval takes a prompt, however often answered, for one observation."""

    accuracy: float | None  # mean over prompts of the share of right answers; None: nothing was scorable
    ci95: tuple[float, float] | None
    n: int  # prompts with a scorable answer

    def as_json(self) -> dict[str, Any]:
        """As others read it."""
        return {"accuracy": self.accuracy, "ci95": self.ci95 and list(self.ci95), "n": self.n}


@dataclass(frozen=True)
class Evaluation:
    """How well prompts were answered. ``k`` answers a prompt."""

    overall: Accuracy
    k: int
    mean_at_k: float | None  # mean over prompts of the mean score of their answers
    pass_at_k: Mapping[int, float]  # by number of draws: 1, 2, 4 … k
    by: Mapping[str, Mapping[str, Accuracy]]
    rewards: Mapping[str, float | None]  # mean score by label
    unscorable: int  # answers
    truncated_fraction: float  # answers that max_new_tokens cut
    tokens_per_completion: float
    tokens_per_s: float
    samples: Sequence[tuple[Sample, Mapping[str, Score]]] = ()  # of this process

    @property
    def accuracy(self) -> float | None:
        """Mean over prompts of the share of right answers."""
        return self.overall.accuracy

    @property
    def ci95(self) -> tuple[float, float] | None:
        """Wilson interval of the accuracy."""
        return self.overall.ci95

    @property
    def n(self) -> int:
        """Prompts with a scorable answer."""
        return self.overall.n

    def as_json(self) -> dict[str, Any]:
        """The document of ``posttune evaluate --json``; ``pass@k`` is that of all k answers."""
        return {
            **self.overall.as_json(),
            "k": self.k,
            "mean@k": self.mean_at_k,
            "pass@k": self.pass_at_k.get(self.k),
            **{f"pass@{draws}": value for draws, value in self.pass_at_k.items()},
            "tokens_per_s": self.tokens_per_s,
            "tokens/completion": self.tokens_per_completion,
            "truncated_fraction": self.truncated_fraction,
            "unscorable": self.unscorable,
            "rewards": dict(self.rewards),
            "by": {
                column: {value: part.as_json() for value, part in parts.items()}
                for column, parts in self.by.items()
            },
        }

    def metrics(self, prefix: str = "val/") -> dict[str, float]:
        """Flat numbers for observers; what does not exist is absent."""
        values = {
            "accuracy": self.accuracy,
            **({f"pass@{self.k}": self.pass_at_k.get(self.k)} if self.k > 1 else {}),
            **{f"reward/{label}/mean": value for label, value in list(self.rewards.items())[1:]},
            "truncated_fraction": self.truncated_fraction,
        }
        return {prefix + name: value for name, value in values.items() if value is not None}

    def table(self) -> pa.Table:
        """One row an answer: prompt_id, prompt, completion, reference, finish_reason, tokens, rewards."""
        import pyarrow as pa

        rows = [_row(sample, scores) for sample, scores in self.samples]
        return pa.Table.from_pylist(rows)


def summarise(
    answers: Sequence[Answer],
    *,
    k: int,
    seconds: float,
    samples: Sequence[tuple[Sample, Mapping[str, Score]]],
) -> Evaluation:
    """Statistics of answers that took ``seconds`` to generate. Raises ValueError where there is none."""
    if not answers:
        raise ValueError("no answers to summarise")
    prompts = _by_prompt(answers)
    labels = answers[0].scores
    columns = answers[0].by
    tokens = sum(answer.tokens for answer in answers)
    return Evaluation(
        overall=_accuracy(list(prompts.values())),
        k=k,
        mean_at_k=mean([mean(scores) or 0.0 for scores in prompts.values()]),
        pass_at_k=_pass_at(list(prompts.values()), k),
        by={column: _broken_down(answers, column) for column in columns},
        rewards={label: mean(_known([answer.scores[label] for answer in answers])) for label in labels},
        unscorable=sum(answer.score is None for answer in answers),
        truncated_fraction=sum(answer.truncated for answer in answers) / len(answers),
        tokens_per_completion=tokens / len(answers),
        tokens_per_s=tokens / seconds if seconds > 0 else 0.0,
        samples=samples,
    )


def _by_prompt(answers: Sequence[Answer]) -> dict[int, list[float]]:
    """Scores of each prompt that has any."""
    prompts: dict[int, list[float]] = {}
    for answer in answers:
        if answer.score is not None:
            prompts.setdefault(answer.prompt, []).append(answer.score)
    return prompts


def _accuracy(prompts: Sequence[Sequence[float]]) -> Accuracy:
    rate = mean([_right(scores) / len(scores) for scores in prompts])
    return Accuracy(rate, None if rate is None else wilson(rate, len(prompts)), len(prompts))


def _pass_at(prompts: Sequence[Sequence[float]], k: int) -> dict[int, float]:
    """Over the prompts that have enough scorable answers."""
    found: dict[int, float] = {}
    for draws in halvings(k):
        enough = [scores for scores in prompts if len(scores) >= draws]
        value = mean([pass_at_k(len(scores), _right(scores), draws) for scores in enough])
        if value is not None:
            found[draws] = value
    return found


def _broken_down(answers: Sequence[Answer], column: str) -> dict[str, Accuracy]:
    values = sorted({answer.by[column] for answer in answers}, key=_natural)
    parts = {value: [answer for answer in answers if answer.by[column] == value] for value in values}
    return {value: _accuracy(list(_by_prompt(part).values())) for value, part in parts.items()}


def _natural(value: str) -> tuple[int, float, str]:
    """Numbers in their order, before other text."""
    try:
        return 0, float(value), value
    except ValueError:
        return 1, 0.0, value


def _right(scores: Sequence[float]) -> int:
    return sum(score >= RIGHT for score in scores)


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _row(sample: Sample, scores: Mapping[str, Score]) -> dict[str, Any]:
    completion = sample.completion
    reference = sample.reference
    return {
        "prompt_id": str(sample.group),
        "prompt": sample.prompt,
        "completion": sample.response,
        "reference": reference if reference is None or isinstance(reference, str) else "\n".join(reference),
        "finish_reason": completion.finish_reason if completion else None,
        "tokens": len(completion.token_ids) if completion else None,
        **{f"reward/{label}": scalar(score) for label, score in scores.items()},
    }
