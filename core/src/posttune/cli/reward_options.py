"""``--reward NAME[:{json options}]``, as a plugin reference."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import click
from pydantic import ValidationError

from posttune.config.models import RewardRef

_SPEC = re.compile(r"(?:(?P<label>[\w.-]+)=)?(?P<name>[\w.-]+)(?::(?P<options>.*))?", re.DOTALL)

HELP = (
    "Reward: NAME, or NAME:{JSON options}, or LABEL=NAME:{JSON options} to use one twice. "
    "May be given several times."
)


Command = TypeVar("Command", bound=Callable[..., Any])


def execution_options(command: Command) -> Command:
    """Options that say how the rewards of ``--reward`` are executed."""
    for option in (
        click.option("--timeout", type=click.FloatRange(0, min_open=True), help="Seconds a sample may take."),
        click.option("--workers", type=click.IntRange(1), help="Samples at a time."),
        click.option(
            "--executor",
            type=click.Choice(["inline", "thread", "process"]),
            help="Where rewards run; process kills a sample that overruns.",
        ),
    ):
        command = option(command)
    return command


def executed(
    refs: Sequence[RewardRef],
    executor: Literal["inline", "thread", "process"] | None,
    workers: int | None,
    timeout: float | None,
) -> list[RewardRef]:
    """The references with what the options say; a timeout or workers alone mean processes."""
    if executor is None and (workers is not None or timeout is not None):
        executor = "process"
    said = {"executor": executor, "workers": workers, "timeout": timeout}
    given = {name: value for name, value in said.items() if value is not None}
    return [RewardRef(**ref.model_dump() | given) for ref in refs]


def parse_reward(text: str) -> RewardRef:
    """A reference from its short form. Raises click.BadParameter."""
    match = _SPEC.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{text!r} is not NAME or NAME:{{...}}", param_hint="--reward")
    options = match["options"]
    try:
        values = {} if options is None else json.loads(options)
        return RewardRef(name=match["name"], label=match["label"], options=values)
    except (ValueError, ValidationError):
        example = 'function:{"path": "my_reward.py:score"}'
        raise click.BadParameter(
            f"what follows the colon in {text!r} is no JSON object; write it as in {example}",
            param_hint="--reward",
        ) from None


def parse_rewards(texts: tuple[str, ...]) -> list[RewardRef]:
    """References from their short forms, in order."""
    return [parse_reward(text) for text in texts]
