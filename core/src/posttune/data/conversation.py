"""Chat messages in one shape, whatever style they were written in.

OpenAI's ``role``/``content`` and ShareGPT's ``from``/``value`` are read; content may be a list of
parts. A message becomes a dict with ``role`` (system, user, assistant, tool), ``content`` (text, or
None beside tool calls) and whatever else it had.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from posttune.data.records import RowError, as_text

Message = dict[str, Any]

ROLE_NAMES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
PART_SEPARATOR = "\n"  # between the text parts of one message
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_PARTS = ("reasoning", "thinking")


def parse_messages(value: object, role: str = "messages") -> tuple[Message, ...]:
    """The messages of a conversation. Raises `RowError` for a shape or a role that is not known."""
    if value is None:
        raise RowError(f"{role} is null")
    if isinstance(value, str):
        value = _from_json(value, role)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RowError(f"{role} is no list of messages")
    if not value:
        raise RowError(f"empty {role}")
    return tuple(_message(item, place) for place, item in enumerate(value, start=1))


def is_conversation(value: object) -> bool:
    """Whether a value is messages rather than text."""
    if isinstance(value, Mapping):
        return bool({"role", "from"} & set(value))
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def last_text(messages: Sequence[Mapping[str, Any]], role: str) -> str | None:
    """The text of the last message of a role; None where there is none."""
    return next((m["content"] for m in reversed(messages) if m["role"] == role and m["content"]), None)


def _from_json(text: str, role: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RowError(f"{role} is text, not a list of messages") from None


def _message(item: object, place: int) -> Message:
    if not isinstance(item, Mapping):
        raise RowError(f"message {place} is no object")
    written = item.get("role", item.get("from"))
    role = ROLE_NAMES.get(str(written).lower())
    if role is None:
        raise RowError(f"unknown role {written!s} in message {place}")
    content = item.get("content", item.get("value"))
    others = {
        k: v for k, v in item.items() if k not in ("role", "from", "content", "value") and v is not None
    }
    message: Message = {"role": role, "content": None, **others}
    _check_extras(message, place)
    if written == "function_call":
        message["tool_calls"] = [_tool_call(content, place)]
    elif isinstance(content, list | tuple):
        _take_parts(message, content, place)
    elif content is not None:
        message["content"] = as_text(content, f"content of message {place}")
    if message["content"] is None and not message.get("tool_calls"):
        raise RowError(f"content of message {place} ({role}) is null")
    return message


def _check_extras(message: Message, place: int) -> None:
    """What the template and the loss read of a message must have their types."""
    for key in ("weight", "loss_weight"):
        if not isinstance(message.get(key, 1), int | float):
            raise RowError(f"{key} of message {place} is no number")
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise RowError(f"tool_calls of message {place} is no list of objects")
    if not all(isinstance(call.get("function", {}), Mapping) for call in calls):
        raise RowError(f"a tool call of message {place} has a function that is no object")


def _take_parts(message: Message, parts: Sequence[object], place: int) -> None:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Any] = list(message.get("tool_calls") or [])
    for part in parts:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise RowError(f"content of message {place} has a part that is no object")
        kind = str(part.get("type", "text"))
        value = part.get("text", part.get("value", part.get("thinking")))
        if kind in _TEXT_PARTS:
            texts.append(as_text(value, f"text part of message {place}"))
        elif kind in _REASONING_PARTS:
            reasoning.append(as_text(value, f"reasoning part of message {place}"))
        elif kind == "tool_call":
            calls.append(_tool_call(value, place))
        else:
            raise RowError(f"{kind.removesuffix('_url')} part in a text-only converter (message {place})")
    message["content"] = PART_SEPARATOR.join(texts) if texts else None
    if reasoning:
        message["reasoning_content"] = PART_SEPARATOR.join(reasoning)
    if calls:
        message["tool_calls"] = calls


def _tool_call(value: object, place: int) -> dict[str, Any]:
    """A call in OpenAI's shape, from an object ``{"name", "arguments"}`` or its JSON text."""
    if isinstance(value, str):
        value = _from_json(value, f"tool call of message {place}")
    if not isinstance(value, Mapping) or "name" not in value:
        raise RowError(f"tool call of message {place} has no name")
    return {"type": "function", "function": dict(value)}
