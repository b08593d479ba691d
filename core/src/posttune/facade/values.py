"""What counts as a number, whoever made it: Python, NumPy or a tensor of one element."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any


def as_list(value: object) -> list[Any] | None:
    """A list, tuple, array or tensor as a list; None for anything else, a string included."""
    if isinstance(value, list | tuple):
        return list(value)
    converted = value.tolist() if hasattr(value, "tolist") else None
    return converted if isinstance(converted, list) else None


def as_number(value: object) -> float | None:
    """A number as a float, NaN among them; None for a bool, an infinity, or no number at all."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    number = float(value)
    return None if math.isinf(number) else number


def shown(value: object) -> str:
    """A value as an error shows it: its type and the start of its repr."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
