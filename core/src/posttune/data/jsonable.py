"""Any value of a source row as strict JSON text."""

from __future__ import annotations

import base64
import datetime
import json
import math
from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from typing import Any


def to_json(value: Any, warnings: Counter[str]) -> str:
    """JSON without NaN: what is not finite becomes null and is counted. Times and decimals become text.

    Bytes become text where they are UTF-8, else base64. Lone surrogates stay, escaped.
    """
    try:
        text = json.dumps(value, default=_plain, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError):  # a NaN, or a key that is no string
        text = json.dumps(_cleaned(value, warnings), ensure_ascii=False, allow_nan=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(json.loads(text))
    return text


def _plain(value: object) -> object:
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return base64.b64encode(value).decode("ascii")
    return str(value)


def _cleaned(value: Any, warnings: Counter[str]) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _cleaned(item, warnings) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(item, warnings) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        warnings["non_finite_number"] += 1
        return None
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return _plain(value)
