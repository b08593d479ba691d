"""Signs that a text is not what its author wrote: counted, shown, never mended."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

REPLACED = "replacement_character"
CONTROL = "control_character"
MOJIBAKE = "mojibake"
ENTITIES = "html_entities"
SPECIAL = "special_tokens_in_text"

GARBLED = (REPLACED, CONTROL, MOJIBAKE)

_CONTROL = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x84\x86-\x9f]")
# UTF-8 that was read as Latin-1 or Windows-1252: a lead byte's letter before a continuation byte's.
_MOJIBAKE = re.compile(
    "[\u00c2\u00c3][\u0080-\u00bf\u0152\u0153\u0160\u0161\u0178\u017d\u017e\u0192\u20ac\u2122]|\u00e2\u20ac."
)
_ENTITY = re.compile(r"&(?:[a-zA-Z]{2,8}|#\d{1,7}|#x[0-9a-fA-F]{1,6});")
_CONTROL_TOKEN = re.compile(r"<\|[^<>|\s]{1,40}\|>|</?s>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>")


class TextCheck:
    """Finds what is odd in a text. ``special`` are the tokenizer's special tokens, where there is one."""

    def __init__(self, special: Iterable[str] = ()) -> None:
        names = sorted((re.escape(token) for token in special), key=len, reverse=True)
        own = re.compile("|".join(names)) if names else None
        self._patterns = [(CONTROL, _CONTROL), (MOJIBAKE, _MOJIBAKE)]
        self._special = [pattern for pattern in (own, _CONTROL_TOKEN) if pattern]

    def __call__(self, text: str) -> set[str]:
        """Codes of what was found."""
        found = set()
        if "\ufffd" in text:
            found.add(REPLACED)
        found.update(code for code, pattern in self._patterns if pattern.search(text))
        if "&" in text and any(html.unescape(m[0]) != m[0] for m in _ENTITY.finditer(text)):
            found.add(ENTITIES)
        if any(pattern.search(text) for pattern in self._special):
            found.add(SPECIAL)
        return found
