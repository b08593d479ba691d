"""What a distribution says about itself, read from its metadata: nothing is imported.

The range of posttune that it accepts is its own requirement on ``posttune``; the engine that it
drives is its extra ``[engine]``.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import Distribution, EntryPoint
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

log = logging.getLogger(__name__)

CORE = "posttune"
ENGINE = "engine"
BUILDS = (ENGINE, "cpu")  # extras of which one is enough: the engine, and its build for a CPU
_DAMAGE = (TypeError, ValueError, AttributeError, KeyError, OSError)


_kept: list[Any] = []  # EntryPoints
_fields: weakref.WeakKeyDictionary[Distribution, dict[str, str]] = weakref.WeakKeyDictionary()


def keep_listing() -> None:
    """List what is installed once and for all, for the processes that are forked from this one."""
    with contextlib.suppress(*_DAMAGE):
        _kept[:] = [importlib.metadata.entry_points()]
        groups = [group for group in _kept[0].groups if group.partition(".")[0] == CORE]
        for point in (each for group in groups for each in _kept[0].select(group=group)):
            if point.dist is not None and point.dist not in _fields:
                _fields[point.dist] = {key: _parsed(point.dist, key) for key in ("Name", "Version")}


def entry_points(*groups: str) -> list[EntryPoint]:
    """The installed entry points of some groups, by name and distribution."""
    try:
        everything = _kept[0] if _kept else importlib.metadata.entry_points()
        found = [point for group in groups for point in everything.select(group=group)]
    except _DAMAGE:
        found = [point for point in _readable_entry_points() if point.group in groups]
    names = {owner: name_of(owner) for owner in {point.dist for point in found}}  # each is parsed once
    return sorted(found, key=lambda point: (point.name, names[point.dist], point.value))


def _readable_entry_points() -> Iterator[EntryPoint]:
    """One distribution with a damaged ``entry_points.txt`` must not hide all others."""
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        name = canonicalize_name(name_of(distribution))
        if name in seen:
            continue
        seen.add(name)
        try:
            points = list(distribution.entry_points)
        except _DAMAGE as error:
            log.warning("the entry points of %s cannot be read (%s); it is passed over", name, error)
            continue
        yield from points


def name_of(distribution: Distribution | None) -> str:
    """A distribution's name, from its folder where its metadata has none."""
    name = _field(distribution, "Name")
    folder = getattr(distribution, "_path", None)
    return name or (folder.name.partition("-")[0] if folder is not None else "")


def _field(distribution: Distribution | None, key: str) -> str:
    if distribution is None:
        return ""
    known = _fields.get(distribution, {})
    return known[key] if key in known else _parsed(distribution, key)


def _parsed(distribution: Distribution, key: str) -> str:
    """The first value of a field of the metadata, which is read anew: it may have changed."""
    try:
        values = distribution.metadata.get_all(key)
    except _DAMAGE:
        return ""
    return str(values[0]) if values else ""


@dataclass(frozen=True, eq=False)
class Owner:
    """A distribution that offers plugins."""

    distribution: Distribution | None

    @cached_property
    def name(self) -> str:
        """Its name."""
        return name_of(self.distribution)

    @cached_property
    def version(self) -> str:
        """Its version; empty where its metadata has none."""
        return _field(self.distribution, "Version")

    @cached_property
    def api(self) -> SpecifierSet:
        """The versions of posttune that it accepts; empty accepts all.

        Raises InvalidRequirement if its requirement on posttune cannot be read.
        """
        ranges = SpecifierSet()
        for requirement in self._requirements(of=CORE):
            if _wanted(requirement, extra=""):
                ranges &= requirement.specifier
        return ranges

    @cached_property
    def engine_faults(self) -> tuple[list[str], list[str]]:
        """What its extra ``[engine]`` requires and is missing, and what is there in a wrong version.

        Nothing where the extra ``[cpu]``, the same engine built for a CPU, is installed in its place.
        """
        found = [self._faults(extra) for extra in BUILDS if extra == ENGINE or extra in self._extras]
        return next((each for each in found if each == ([], [])), found[0])

    @property
    def _extras(self) -> list[str]:
        if self.distribution is None:
            return []
        return [str(name) for name in self.distribution.metadata.get_all("Provides-Extra") or ()]

    def _faults(self, extra: str) -> tuple[list[str], list[str]]:
        missing, conflicting = [], []
        for requirement in self._requirements():
            if not _wanted(requirement, extra=extra) or _wanted(requirement, extra=""):
                continue
            wanted = f"{requirement.name}{requirement.specifier}"
            installed = _installed_version(requirement.name)
            if installed is None:
                missing.append(f"{wanted} is not installed")
            elif not _satisfies(requirement.specifier, installed):
                conflicting.append(f"{requirement.name} {installed} is installed, {wanted} is required")
        return missing, conflicting

    def _requirements(self, of: str = "") -> Iterator[Requirement]:
        """Its requirements; one that cannot be read raises if it is about ``of``, else is passed over."""
        for line in (self.distribution.requires or []) if self.distribution is not None else []:
            match = re.match(r"[A-Za-z0-9._-]+", line)
            name = canonicalize_name(match.group()) if match else ""
            if of and name != of:
                continue
            try:
                yield Requirement(line)
            except InvalidRequirement:
                if of:
                    raise


def accepts(ranges: SpecifierSet, version: str) -> bool:
    """Whether a range holds a version. A pre-release counts as the release that it leads to."""
    return ranges.contains(Version(version).base_version, prereleases=True)


def _wanted(requirement: Requirement, *, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _satisfies(ranges: SpecifierSet, version: str) -> bool:
    try:
        return ranges.contains(version, prereleases=True)
    except InvalidVersion:
        return False
