"""Chat templates: which one applies, and what text each turn of a conversation becomes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from posttune.data.records import RowError
from posttune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Template:
    """A decision on chat templates: ``choice`` as given, ``source`` the Jinja text or None for none."""

    choice: str
    source: str | None

    def as_meta(self) -> dict[str, Any]:
        """What ``meta.json`` records."""
        digest = hashlib.sha256(self.source.encode()).hexdigest() if self.source is not None else None
        return {
            "choice": self.choice,
            "applied": self.source is not None,
            "sha256": digest,
            "text": self.source,
        }


@dataclass(frozen=True)
class Piece:
    """A part of the text of a sequence."""

    text: str
    trained: bool


def resolve_template(choice: str, tokenizer: PreTrainedTokenizerBase) -> Template:
    """``auto``: the tokenizer's own where it has one; ``none``; or the path of a Jinja file.

    Raises `DataError` where the file cannot be read or is no template.
    """
    if choice == "none":
        return Template(choice, None)
    if choice == "auto":
        return Template(choice, own_template(tokenizer))
    path = Path(choice).expanduser()
    try:
        source = path.read_text("utf-8")
        jinja2.Environment(autoescape=False, extensions=["jinja2.ext.loopcontrols"]).parse(source)
    except (OSError, UnicodeDecodeError) as error:
        fix = "give auto, none or the path of a Jinja file"
        raise DataError(f"cannot be read: {error}", who=f"template {choice}", fix=fix) from error
    except jinja2.TemplateSyntaxError as error:
        if "generation" not in str(error):  # a tag that only transformers knows
            what = f"line {error.lineno}: {error.message}"
            raise DataError(what, who=f"template {choice}", fix="mend the template") from error
    return Template(choice, source)


def own_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The tokenizer's chat template; of several, the one called default."""
    own: str | Mapping[str, str] | None = tokenizer.chat_template
    if isinstance(own, Mapping):
        return own.get("default", next(iter(own.values()), None))
    return own or None


class Renderer:
    """Turns conversations into text with one template. Knows what marks the end of a turn."""

    def __init__(self, template: Template, tokenizer: PreTrainedTokenizerBase) -> None:
        self._source = template.source
        self._tokenizer = tokenizer
        self._end = _end_of_turn(tokenizer)

    def pieces(self, messages: Messages, tools: object = None) -> list[Piece]:
        """The conversation's text in parts, the assistant's turns trained.

        The last piece is the final assistant turn up to its end mark, or ends with the prompt for
        one. Raises `RowError` where the template refuses the conversation.
        """
        conversation = [_with_objects(message) for message in messages]
        tools = _tools(tools)
        if conversation[-1]["role"] != "assistant":
            return [Piece(self._render(conversation, tools, prompt=True), False)]
        pieces = self._turn_by_turn(conversation, tools) or self._last_turn(conversation, tools)
        if not any(piece.trained for piece in pieces):
            raise RowError("no assistant turn is trained: all have weight 0")
        return pieces

    def _turn_by_turn(self, messages: Messages, tools: Any) -> list[Piece]:
        """Every assistant turn, or nothing where the template rewrites earlier turns as it goes on."""
        pieces: list[Piece] = []
        done = ""
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:place], tools, prompt=True)
            after = self._render(messages[: place + 1], tools)
            if not before.startswith(done) or not after.startswith(before):
                return []
            turn = self._turn(after[len(before) :], message)
            pieces += [Piece(before[len(done) :], False), Piece(turn, _weight(message) > 0)]
            done = before + turn
        return pieces

    def _last_turn(self, messages: Messages, tools: Any) -> list[Piece]:
        """The last assistant turn only, after the context as a rollout would see it."""
        before = self._render(messages[:-1], tools, prompt=True)
        whole = self._render(messages, tools)
        content = str(messages[-1]["content"] or "").strip()
        at = whole.rfind(content) if content else -1
        if at < 0:
            raise RowError("the chat template does not show the last assistant turn")
        return [Piece(before, False), Piece(self._turn(whole[at:], messages[-1]), _weight(messages[-1]) > 0)]

    def _turn(self, text: str, message: Mapping[str, Any]) -> str:
        """An assistant's turn up to its end mark; without a mark, its content."""
        for name in _called(message):
            if name not in text:  # trained on this, a model would answer nothing instead of calling
                raise RowError(f"the chat template does not show the call of tool {name!r}")
        mark = self._end.search(text)
        if mark:
            return text[: mark.end()]
        content = message["content"] or ""
        at = text.find(content.strip()) if content.strip() else -1
        return text[: at + len(content.strip())] if at >= 0 else text

    def _render(self, messages: Messages, tools: Any, *, prompt: bool = False) -> str:
        if not messages:
            return ""
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=tools,
                chat_template=self._source,
                add_generation_prompt=prompt,
                tokenize=False,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            raise RowError(f"the chat template refuses the conversation: {error}") from error
        return str(text)


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Matches the special token that ends a turn: nothing but space follows it."""
    added = tokenizer.added_tokens_decoder.values()
    names = {token.content for token in added if token.special or token.content.startswith("<")}
    names |= set(tokenizer.all_special_tokens)
    options = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) or r"(?!)"
    return re.compile(rf"(?:{options})(?=\s*\Z)")


def _called(message: Mapping[str, Any]) -> list[str]:
    """Names of the tools that the message calls."""
    functions = [call.get("function") or call for call in message.get("tool_calls") or ()]
    return [str(function["name"]) for function in functions if "name" in function]


def _weight(message: Mapping[str, Any]) -> float:
    return float(message.get("weight", message.get("loss_weight", 1.0)))


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy for the template: arguments of tool calls as objects, which templates expect."""
    copied = dict(message)
    if copied["content"] is None:
        copied["content"] = ""
    if copied.get("tool_calls"):
        copied["tool_calls"] = [_call(call) for call in copied["tool_calls"]]
    return copied


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _tools(tools: object) -> Any:
    if not isinstance(tools, str) or not tools.strip():
        return tools or None
    try:
        return json.loads(tools) or None
    except ValueError:
        raise RowError("the column tools is no JSON") from None
