"""What is installed, and what a distribution requires, all the way down. Reads metadata only."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import Distribution

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from posttune import metadata

_DAMAGE = (TypeError, ValueError, AttributeError, KeyError, OSError)


@dataclass(frozen=True)
class Need:
    """A requirement and who has it."""

    requirement: Requirement
    holder: str
    engine: bool  # asked for by the extra [engine]
    depth: int  # 1: of the plugin itself


@dataclass
class Closure:
    """Everything that a distribution requires."""

    needs: list[Need] = field(default_factory=list)
    missing: list[Need] = field(default_factory=list)
    conflicting: list[tuple[Need, str]] = field(default_factory=list)  # with the version installed
    damaged: list[tuple[str, str]] = field(default_factory=list)  # holder, line


class Inventory:
    """The distributions on the path. The first of a name is the one that Python uses."""

    def __init__(self) -> None:
        self._by_name: dict[str, list[Distribution]] = {}
        self._closures: dict[str, Closure] = {}
        self._read: dict[str, tuple[list[Requirement], list[str]]] = {}
        for distribution in importlib.metadata.distributions():
            name = canonicalize_name(metadata.name_of(distribution))
            if name:
                self._by_name.setdefault(name, []).append(distribution)

    def __iter__(self) -> Iterator[Distribution]:
        return iter([each[0] for each in self._by_name.values()])

    def get(self, name: str) -> Distribution | None:
        """The distribution of a name, if it is installed."""
        found = self._by_name.get(canonicalize_name(name))
        return found[0] if found else None

    def version(self, name: str) -> str:
        """Its version; empty where it is not installed, or says none."""
        found = self.get(name)
        return version_of(found) if found is not None else ""

    @cached_property
    def twice(self) -> dict[str, list[str]]:
        """The places of every distribution that is there more than once."""
        places = {name: sorted({_place(each) for each in found}) for name, found in self._by_name.items()}
        return {name: found for name, found in places.items() if len(found) > 1}

    def closure(self, name: str) -> Closure:
        """What a distribution needs with its engine, and what is wrong with that."""
        key = canonicalize_name(name)
        if key not in self._closures:
            self._closures[key] = self._closure(name)
        return self._closures[key]

    def _closure(self, name: str) -> Closure:
        found = Closure()
        seen: set[tuple[str, str]] = set()
        waiting: list[tuple[str, str, bool, int]] = [(name, "", False, 1), (name, metadata.ENGINE, True, 1)]
        while waiting:
            holder, extra, engine, depth = waiting.pop(0)
            if (canonicalize_name(holder), extra) in seen:
                continue
            seen.add((canonicalize_name(holder), extra))
            for requirement in self._requirements(holder, extra, found):
                need = Need(requirement, holder, engine, depth)
                if self._judge(need, found):
                    inner = (requirement.name, engine, depth + 1)
                    waiting += [(inner[0], each, *inner[1:]) for each in ("", *sorted(requirement.extras))]
        return found

    def _judge(self, need: Need, found: Closure) -> bool:
        """Note what is wrong with a need; whether it is installed."""
        found.needs.append(need)
        if self.get(need.requirement.name) is None:
            found.missing.append(need)
            return False
        version = self.version(need.requirement.name)
        if version and not satisfies(need.requirement.specifier, version):
            found.conflicting.append((need, version))
        return True

    def _requirements(self, name: str, extra: str, found: Closure) -> list[Requirement]:
        """What a distribution asks for with an extra, or without one."""
        requirements, damaged = self._lines(name)
        found.damaged += [(name, line) for line in damaged if (name, line) not in found.damaged]
        return [
            each for each in requirements if _applies(each, extra) and (not extra or not _applies(each, ""))
        ]

    def _lines(self, name: str) -> tuple[list[Requirement], list[str]]:
        """The requirements of a distribution, read once, and the lines that cannot be read."""
        key = canonicalize_name(name)
        if key not in self._read:
            distribution = self.get(name)
            self._read[key] = _parsed(requires_of(distribution) if distribution is not None else [])
        return self._read[key]


def _parsed(lines: list[str]) -> tuple[list[Requirement], list[str]]:
    good: list[Requirement] = []
    damaged: list[str] = []
    for line in lines:
        try:
            good.append(Requirement(line))
        except InvalidRequirement:
            damaged.append(line)
    return good, damaged


def requires_of(distribution: Distribution) -> list[str]:
    """The lines of its requirements; none where its metadata cannot be read."""
    try:
        return list(distribution.requires or [])
    except _DAMAGE:
        return []


def version_of(distribution: Distribution) -> str:
    """Its version; empty where its metadata has none."""
    return metadata.Owner(distribution).version


def readable(distribution: Distribution) -> bool:
    """Whether its entry points and its name can be read."""
    try:
        list(distribution.entry_points)
        return bool(distribution.metadata["Name"])
    except _DAMAGE:
        return False


def satisfies(ranges: SpecifierSet, version: str) -> bool:
    """Whether a version that is installed is in a range; pre-releases count."""
    try:
        return ranges.contains(version, prereleases=True)
    except InvalidVersion:
        return False


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _place(distribution: Distribution) -> str:
    return str(distribution.locate_file(""))
