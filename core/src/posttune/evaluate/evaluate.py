"""Answers the prompts of a dataset and judges the answers. Shared by the stage, the command and training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from posttune.data.dataset import SampleDataset
from posttune.errors import DataError
from posttune.evaluate.report import Answer, Evaluation, summarise
from posttune.facade import Rewards, RolloutEngine
from posttune.nearest import nearest
from posttune.reward.scoring import scalar
from posttune.rollout.requests import make_requests, make_samples
from posttune.types import Sample, Sampling, Score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttune.distributed.ranks import Ranks

CHUNK = 256  # prompts between two reports of progress

Judged = tuple[Sample, Mapping[str, Score]]


def evaluate(
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    dataset: SampleDataset,
    rewards: Rewards,
    sampling: Sampling,
    limit: int | None = None,
    *,
    seed: int = 0,
    by: Sequence[str] = (),
    ranks: Ranks | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Answer the first ``limit`` prompts ``sampling.n`` times each; the first reward says what is right.

    ``dataset`` holds token ids. ``by`` names columns to break the accuracy down by. Every rank
    answers its share and gets the whole result; its ``samples`` are its own. ``progress`` is told how
    many prompts of how many are done; it may raise to stop. Raises DataError for an empty dataset and
    for an unknown column.
    """
    size = min(len(dataset), len(dataset) if limit is None else limit)
    if size == 0:
        raise DataError("the dataset has no rows", who=str(dataset.folder), fix="convert data that has some")
    _check_columns(dataset, by)
    indices = list(range(size))
    mine = indices if ranks is None else ranks.share(indices)
    judged: list[Judged] = []
    seconds = 0.0
    rounds = len(mine) if ranks is None else ranks.longest_share(size)
    for start in range(0, rounds, CHUNK):
        chunk = mine[start : start + CHUNK]
        more, took = _answered(engine, tokenizer, dataset, rewards, sampling, chunk, seed)
        judged += more
        seconds += took
        if progress is not None:
            progress(start + len(chunk), len(mine))
    answers = [_answer(sample, scores, by) for sample, scores in judged]
    if ranks is not None:
        parts = ranks.all_objects((answers, seconds))
        answers = [answer for part, _ in parts for answer in part]
        seconds = max(took for _, took in parts)
    return summarise(answers, k=sampling.n, seconds=seconds, samples=judged)


def _answered(
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    dataset: SampleDataset,
    rewards: Rewards,
    sampling: Sampling,
    indices: Sequence[int],
    seed: int,
) -> tuple[list[Judged], float]:
    """The judged answers of some rows, and the seconds that generating them took."""
    rows = [dataset[index] for index in indices]
    requests = make_requests(
        [str(index) for index in indices], [row["prompt_ids"] for row in rows], seed=seed
    )
    began = time.perf_counter()
    completions = engine.generate(requests, sampling)
    seconds = time.perf_counter() - began
    samples = make_samples(
        rows, requests, completions, tokenizer, [dataset.origin(index) for index in indices]
    )
    scores = rewards.score(samples)
    judged: list[Judged] = [
        (sample, {label: each[i] for label, each in scores.items()}) for i, sample in enumerate(samples)
    ]
    return judged, seconds


def _answer(sample: Sample, scores: Mapping[str, Score], by: Sequence[str]) -> Answer:
    completion = sample.completion
    assert completion is not None
    return Answer(
        prompt=int(completion.request_id),
        scores={label: scalar(score) for label, score in scores.items()},
        tokens=len(completion.token_ids),
        truncated=completion.finish_reason == "length",
        by={column: _shown(sample.columns.get(column)) for column in by},
    )


def _shown(value: Any) -> str:
    return "" if value is None else str(value)


def _check_columns(dataset: SampleDataset, by: Sequence[str]) -> None:
    known = dataset.metadata_columns
    for column in by:
        if column not in known:
            likely = nearest(column, known)
            hint = f" (did you mean {likely!r}?)" if likely else ""
            raise DataError(
                f"there is no column {column!r} to break the accuracy down by{hint}",
                who=str(dataset.folder),
                fix=f"the columns are {', '.join(known) or 'none'}",
            )
