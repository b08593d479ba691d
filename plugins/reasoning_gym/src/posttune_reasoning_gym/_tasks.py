"""reasoning-gym's tasks: made, written down, found again, scored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import Any

from posttune.errors import DataError, UserError

OPEN, CLOSE = "<answer>", "</answer>"
SUFFIX = f"\nGive the final answer between {OPEN} and {CLOSE}."


@cache
def load() -> Any:
    """The package. It takes seconds to import."""
    import reasoning_gym

    return reasoning_gym


def tagged(text: str) -> str | None:
    """What the last pair of answer tags encloses; None where there is none."""
    end = text.rfind(CLOSE)
    start = text.rfind(OPEN, 0, end) if end >= 0 else -1
    return text[start + len(OPEN) : end].strip() if start >= 0 else None


def names() -> list[str]:
    """All tasks; ``composite`` is a mixture of others and none by itself."""
    return sorted(set(load().factory.DATASETS) - {"composite"})


def rows(task: str, size: int, seed: int, config: Mapping[str, Any], suffix: str) -> Iterator[dict[str, Any]]:
    """``size`` problems of a task as rows of data. Raises UserError for an unknown task or option."""
    settings = json.dumps(config, sort_keys=True)
    problems = _dataset(task, size, seed, settings)
    for index in range(size):
        entry = problems[index]
        args = {"seed": seed, "size": size, "index": index, "config": settings}
        args |= {"entry": entry} if _faithful(entry) else {"digest": _digest(entry)}
        answer = entry["answer"]
        yield {
            "prompt": entry["question"] + suffix,
            "response": "" if answer is None else f"{OPEN}{answer}{CLOSE}",
            "reference": "" if answer is None else str(answer),
            "task": task,
            "task_args": json.dumps(args),
        }


def score(task: str, task_args: str, answer: str) -> float:
    """What the task's scorer gives to an answer. Raises DataError where the problem cannot be had again."""
    problems, entry = _problem(task, task_args)
    return float(problems.score_answer(answer, entry))


@lru_cache(4096)
def _problem(task: str, task_args: str) -> tuple[Any, dict[str, Any]]:
    try:
        args = json.loads(task_args)
        problems = _dataset(task, args["size"], args["seed"], args["config"])
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(task, f"its task_args cannot be read: {error!r}") from error
    if "entry" in args:
        return problems, args["entry"]
    entry = problems[args["index"]]
    if _digest(entry) != args.get("digest"):
        raise _damaged(task, f"problem {args['index']} came out differently this time")
    return problems, entry


@lru_cache(64)
def _dataset(task: str, size: int, seed: int, settings: str) -> Any:
    if task not in names():
        near = get_close_matches(task, names(), 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        fix = "`posttune reasoning-gym --list` shows them"
        raise UserError(f"there is no task {task!r}{hint}", who="reasoning-gym", fix=fix)
    try:
        return load().create_dataset(task, seed=seed, size=size, **json.loads(settings))
    except (TypeError, ValueError, AssertionError) as error:
        fix = "see the task's configuration in reasoning-gym"
        raise UserError(
            f"the task {task!r} refuses its options: {error}", who="reasoning-gym", fix=fix
        ) from error


def _faithful(entry: Mapping[str, Any]) -> bool:
    """Whether JSON gives the same entry back: a tuple, a set or a key that is no text would not survive."""
    try:
        return repr(json.loads(json.dumps(entry))) == repr(entry)
    except (TypeError, ValueError):
        return False


def _digest(entry: Mapping[str, Any]) -> str:
    text = f"{entry['question']}\0{entry['answer']}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _damaged(task: str, what: str) -> DataError:
    fix = "make the data again with this version of reasoning-gym, or leave the task out"
    return DataError(what, who=f"task {task!r} of reasoning-gym", fix=fix)
