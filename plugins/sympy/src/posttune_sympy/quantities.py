"""Units that are converted into one another: lengths, masses, times, volumes, money."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from posttune_sympy.nodes import Node, number


def _table(dimension: str, text: str) -> dict[str, tuple[str, Fraction]]:
    """``names=size`` by name; the plural of a name of three letters and more is its own."""
    found: dict[str, tuple[str, Fraction]] = {}
    for entry in text.split():
        names, _, size = entry.partition("=")
        for name in names.split("/"):
            found[name] = (dimension, Fraction(size))
            if len(name) > 2 and not name.endswith("s"):
                found[name + "s"] = found[name]
    return found


_UNITS = (
    _table(
        "length",
        "mm/millimeter/millimetre=1/1000 cm/centimeter/centimetre=1/100 dm/decimeter=1/10 m/meter/metre=1 "
        "km/kilometer/kilometre=1000 in/inch/inches=127/5000 ft/foot/feet=381/1250 yd/yard=1143/1250 "
        "mi/mile=201168/125",
    )
    | _table(
        "mass",
        "mg/milligram=1/1000000 g/gram=1/1000 kg/kilogram=1 ton/tonne=1000 lb/lbs/pound=45359237/100000000 "
        "oz/ounce=45359237/1600000000",
    )
    | _table("time", "s/sec/second=1 min/minute=60 h/hr/hour=3600 day=86400 week/wk=604800")
    | _table("volume", "ml/milliliter/millilitre=1/1000 cl=1/100 dl=1/10 l/liter/litre=1")
    | _table("money", "cent=1/100 dollar=1")
)
_POWER = re.compile(
    r"(?:(?P<before>square|sq|cubic|cu)\s+)?(?P<name>[a-z]+)(?:\s*\^\s*(?P<power>[23])|\s+(?P<after>squared|cubed))?"
)
_POWERS = {"square": 2, "sq": 2, "squared": 2, "2": 2, "cubic": 3, "cu": 3, "cubed": 3, "3": 3}
_PART = re.compile(r"\s*(?:,|and\b)?\s*(\d+(?:\.\d+)?|\d+/\d+)\s*([A-Za-z]+)\.?")


@dataclass(frozen=True)
class Unit:
    """What is measured, and how many of its base units a unit is."""

    dimension: str
    size: Fraction


def unit(name: str) -> Unit | None:
    """The unit of that name; None for one that is not converted."""
    found = _POWER.fullmatch(name.strip(" .").lower())
    if found is None or found["name"] not in _UNITS:
        return None
    dimension, size = _UNITS[found["name"]]
    power = next((_POWERS[found[key]] for key in ("before", "power", "after") if found[key]), 1)
    return Unit(f"{dimension}^{power}", size**power)


def compound(words: str) -> Iterator[Node]:
    """``2 hours 30 minutes`` in each of its units; nothing for what is no such quantity."""
    parts: list[tuple[Fraction, str, Unit]] = []
    position = 0
    while position < len(words) and (found := _PART.match(words, position)) and len(parts) < 4:
        known = unit("min" if found[2] == "m" and parts and parts[0][2].dimension == "time^1" else found[2])
        if known is None:
            return
        parts.append((Fraction(found[1]), found[2], known))
        position = found.end()
    sizes = [each.size for _, _, each in parts]
    if position < len(words) or len(parts) < 2 or len({each.dimension for _, _, each in parts}) > 1:
        return
    if sizes != sorted(set(sizes), reverse=True):
        return
    total = sum((value * each.size for value, _, each in parts), Fraction(0))
    for _, name, each in parts:
        yield Node("unit", (number(total / each.size), name))
