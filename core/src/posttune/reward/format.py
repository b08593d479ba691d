"""The reward `format`: 1 where an answer has the form that is asked for, else 0."""

from __future__ import annotations

import logging
import re as standard_re
from typing import Any, Literal

import regex  # type: ignore[import-untyped]
from pydantic import Field, field_validator, model_validator

from posttune.config.models import PositiveFloat, Strict
from posttune.reward.base import BaseRewardFunction

log = logging.getLogger(__name__)

_TAG = standard_re.compile(r"[A-Za-z_][\w.:-]*")


class FormatConfig(Strict):
    """Either a pattern or tags."""

    pattern: str | None = Field(
        None, description="Regular expression (the regex module's; a dot matches a newline too)."
    )
    tags: list[str] | None = Field(
        None, min_length=1, description="Tag names: <a>…</a><b>…</b>, each once, in this order, not nested."
    )
    match: Literal["full", "partial"] = Field(
        "full", description="full: the whole answer, outer whitespace aside; partial: anywhere in it."
    )
    timeout_s: PositiveFloat = Field(
        1.0, description="Seconds that a pattern may take on one answer; then the answer is unscorable."
    )

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                regex.compile(value, regex.DOTALL)
            except regex.error as error:
                raise ValueError(f"no regular expression: {error}") from None
        return value

    @field_validator("tags")
    @classmethod
    def _are_names(cls, value: list[str] | None) -> list[str] | None:
        for tag in value or ():
            if not _TAG.fullmatch(tag):
                raise ValueError(f"{tag!r} is no tag name: write think, not <think>")
        if len(set(value or ())) < len(value or ()):
            raise ValueError("a tag is named twice")
        return value

    @model_validator(mode="after")
    def _one_of_two(self) -> FormatConfig:
        if (self.pattern is None) == (self.tags is None):
            raise ValueError("give either pattern or tags")
        return self


class FormatReward(BaseRewardFunction):
    """1.0 where the response matches, else 0.0.

    A pattern runs with a time limit, since one with nested repeats can take exponential time on a
    text that a model made up: past it the answer is None, and a warning says so.
    """

    Config = FormatConfig

    def compute_reward(
        self,
        prompt: str,  # noqa: ARG002
        response: str,
        reference: Any = None,  # noqa: ARG002
        **_columns: Any,
    ) -> float | None:
        """1.0, 0.0, or None past the time limit."""
        config: FormatConfig = self.config
        if config.tags is not None:
            return float(_has_tags(response, config.tags, full=config.match == "full"))
        return self._matches(response, config)

    def _matches(self, response: str, config: FormatConfig) -> float | None:
        compiled = regex.compile(config.pattern, regex.DOTALL)  # cached by the module
        try:
            if config.match == "full":
                found = compiled.fullmatch(response.strip(), timeout=config.timeout_s)
            else:
                found = compiled.search(response, timeout=config.timeout_s)
        except TimeoutError:
            log.warning(
                "reward 'format': the pattern took over %g s on %d characters, which counts as unscorable",
                config.timeout_s,
                len(response),
            )
            return None
        return float(found is not None)


def _has_tags(text: str, tags: list[str], *, full: bool) -> bool:
    """Each tag opens and closes exactly once, one pair after the other."""
    end = 0
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return False
        start = text.index(opening)
        stop = text.index(closing)
        if start < end or stop < start + len(opening):
            return False
        if full and text[end:start].strip():
            return False
        end = stop + len(closing)
    return not (full and text[end:].strip())
