"""Signs that a text is not what its author wrote: counted, shown, never mended."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

import numpy as np

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


# No finding without one of these in the UTF-8 text; searching for them is many times faster.
_SIGNS = tuple(
    sign.encode()
    for sign in (
        "\ufffd",
        "\u00c2",
        "\u00c3",
        "\u00e2\u20ac",
        "&",
        "<|",
        "<s>",
        "</s>",
        "INST]",
        "SYS>>",
        "_of_turn>",
    )
)
_C1 = b"\xc2"  # begins U+0080 to U+00BF
_C0_LETTERS = [bytes([code]) for code in (*range(9), 0x0B, *range(0x0E, 0x20))]
_DEL = b"\x7f"
_RARE = b"\xef\xc2\xc3<]>_&"


def _rarest(sign: bytes) -> bytes:
    """A byte of it that is seldom in texts: looking for one byte costs next to nothing."""
    return next((bytes([byte]) for byte in _RARE if byte in sign), sign[:1])


class TextCheck:
    """Finds what is odd in a text. ``special`` are the tokenizer's special tokens, where there is one."""

    def __init__(self, special: Iterable[str] = ()) -> None:
        special = [token for token in special if token]
        names = sorted((re.escape(token) for token in special), key=len, reverse=True)
        own = re.compile("|".join(names)) if names else None
        self._patterns = [(CONTROL, _CONTROL), (MOJIBAKE, _MOJIBAKE)]
        self._special = [pattern for pattern in (own, _CONTROL_TOKEN) if pattern]
        signs = (*_SIGNS, _C1, *(token.encode() for token in special))
        self._signs = [(_rarest(sign), sign) for sign in dict.fromkeys(signs)]

    def signs(self, text: str) -> list[bytes]:
        """What stands in a text without which nothing can be found in its parts. Fast, for long texts."""
        return self.signs_in(text.encode("utf-8", "surrogatepass"))

    def signs_in(self, data: bytes) -> list[bytes]:
        """The same for text in UTF-8."""
        found = [sign for rare, sign in self._signs if rare in data and sign in data]
        letters = np.frombuffer(data, np.uint8)
        low, usual = np.count_nonzero(letters < ord(" ")), np.count_nonzero(letters == ord("\n"))
        if low > usual:
            found += [letter for letter in _C0_LETTERS if letter in data]
        return [*found, _DEL] if _DEL in data else found

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
