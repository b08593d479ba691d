"""``--reward NAME[:{json options}]``, as a plugin reference."""

from __future__ import annotations

import json
import re

import click
from pydantic import ValidationError

from posttune.config.models import PluginRef

_SPEC = re.compile(r"(?:(?P<label>[\w.-]+)=)?(?P<name>[\w.-]+)(?::(?P<options>.*))?", re.DOTALL)

HELP = (
    "Reward: NAME, or NAME:{JSON options}, or LABEL=NAME:{JSON options} to use one twice. "
    "May be given several times."
)


def parse_reward(text: str) -> PluginRef:
    """A reference from its short form. Raises click.BadParameter."""
    match = _SPEC.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{text!r} is not NAME or NAME:{{...}}", param_hint="--reward")
    options = match["options"]
    try:
        values = {} if options is None else json.loads(options)
        return PluginRef(name=match["name"], label=match["label"], options=values)
    except (ValueError, ValidationError):
        example = 'function:{"path": "my_reward.py:score"}'
        raise click.BadParameter(
            f"what follows the colon in {text!r} is no JSON object; write it as in {example}",
            param_hint="--reward",
        ) from None


def parse_rewards(texts: tuple[str, ...]) -> list[PluginRef]:
    """References from their short forms, in order."""
    return [parse_reward(text) for text in texts]
