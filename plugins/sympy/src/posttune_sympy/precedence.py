"""How tightly operators bind, and how deep an answer may nest."""

from __future__ import annotations

MAX_DEPTH = 60
MAX_POSTFIX = 20

THEN, SEMICOLON, COMMA, RELATION, SET, RATIO, UNIT, SUM, PRODUCT, SIGN, PERCENT, POWER, POSTFIX = range(1, 14)

RELATIONS = frozenset({"=", "!=", "<", ">", "<=", ">=", "~", "in", "subset"})
SETS = {"cup": "union", "cap": "inter", "minus": "minus"}
