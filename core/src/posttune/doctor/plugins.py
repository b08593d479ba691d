"""What is wrong with the installed plugins, as far as metadata tells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, EntryPoint
from itertools import combinations

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from posttune import metadata
from posttune.catalog import BLOCK_VARIABLE, Catalog, Entry
from posttune.doctor.findings import Finding, Severity
from posttune.doctor.inventory import Closure, Inventory, readable, version_of
from posttune.doctor.ranges import disjoint
from posttune.errors import UserError
from posttune.kinds import COMMAND_GROUP, KINDS
from posttune.nearest import nearest

GROUPS = frozenset([*(kind.group for kind in KINDS.values()), COMMAND_GROUP])
CORE = metadata.CORE


def owners(inventory: Inventory) -> list[str]:
    """The distributions that offer plugins, core first."""
    names = {canonicalize_name(metadata.name_of(each)) for each in inventory if _points(each)}
    return sorted(names, key=lambda name: (name != CORE, name))


def chosen(names: Sequence[str], inventory: Inventory, catalog: Catalog) -> list[str]:
    """The distributions that are meant by names of plugins or distributions. Raises UserError."""
    found: list[str] = []
    known = {owner: [owner] for owner in owners(inventory)}
    for entry in catalog.entries():
        known.setdefault(entry.name, []).append(canonicalize_name(entry.distribution))
    for name in names:
        meant = known.get(name) or known.get(canonicalize_name(name))
        if meant is None:
            near = nearest(name, known)
            hint = f" (did you mean {near!r}?)" if near else ""
            raise UserError(
                f"no installed plugin or distribution is called {name!r}{hint}", fix="posttune plugins list"
            )
        found += [each for each in meant if each not in found]
    return found


def plugin_findings(
    inventory: Inventory, catalog: Catalog, wanted: Sequence[str], *, named: bool
) -> Iterator[Finding]:
    """Findings about the wanted distributions. What was named must work; what was not may lack its engine."""
    yield from _damaged(inventory)
    entries = catalog.entries()
    for owner in wanted:
        mine = [each for each in entries if canonicalize_name(each.distribution) == owner]
        yield _offer(owner, inventory, mine)
        yield from _twice(owner, inventory)
        yield from _dangling(owner, inventory)
        yield from _statuses(owner, mine)
        yield from _requirements(owner, inventory.closure(owner), named=named)
    yield from _pins(inventory, wanted if named else owners(inventory), owners(inventory))


def _damaged(inventory: Inventory) -> Iterator[Finding]:
    for distribution in inventory:
        if not readable(distribution):
            name = metadata.name_of(distribution)
            fix = f"pip install --force-reinstall {name}"
            yield Finding("metadata-damaged", "warning", name, "its metadata cannot be read", fix)


def _offer(owner: str, inventory: Inventory, entries: Iterable[Entry]) -> Finding:
    kinds: dict[str, list[str]] = {}
    for entry in entries:
        kinds.setdefault(entry.kind, []).append(entry.name)
    offers = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items())
    cause = f"{inventory.version(owner) or 'no version'} offers {offers or 'commands only'}"
    return Finding("plugin", "info", owner, cause, "posttune plugins list")


def _twice(owner: str, inventory: Inventory) -> Iterator[Finding]:
    if owner in inventory.twice:
        cause = f"it is installed in {' and in '.join(inventory.twice[owner])}"
        fix = f"pip uninstall {owner}, as often as it is found, then install it once"
        yield Finding("distribution-twice", "warning", owner, cause, fix)


def _points(distribution: Distribution) -> list[EntryPoint]:
    try:
        return [point for point in distribution.entry_points if point.group in GROUPS]
    except (TypeError, ValueError, AttributeError, KeyError, OSError):
        return []


def _dangling(owner: str, inventory: Inventory) -> Iterator[Finding]:
    distribution = inventory.get(owner)
    for point in _points(distribution) if distribution is not None else []:
        if not point.pattern.match(point.value) or ":" not in point.value:
            cause = f"{point.group} {point.name!r} is {point.value!r}, not module:attribute"
            yield Finding("entry-point-malformed", "error", owner, cause, _reinstall(owner))
        elif not _exists(point.module):
            cause = f"{point.group} {point.name!r} names {point.value}, and there is no such module"
            yield Finding("entry-point-dangling", "error", owner, cause, _reinstall(owner))


def _exists(module: str) -> bool:
    """Whether a module can be found, without importing any package around it."""
    path: Sequence[str] | None = None
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = _spec(name, path)
        if spec is None:
            return False
        path = list(spec) or ["."]
    return True


def _spec(name: str, path: Sequence[str] | None) -> list[str] | None:
    """The search path of a module, empty for a plain one; None where it cannot be found."""
    try:
        found = PathFinder.find_spec(name, path)
        if found is None and path is None:
            from importlib.util import find_spec

            found = find_spec(name)  # a finder of an editable install; a top-level name imports nothing
    except (ImportError, ValueError, AttributeError):
        return None
    return None if found is None else list(found.submodule_search_locations or [])


def _statuses(owner: str, entries: Iterable[Entry]) -> Iterator[Finding]:
    for entry in entries:
        subject = f"{entry.kind} {entry.name}"
        if entry.status == "api mismatch":
            fix = f'pip install --upgrade "{owner}" posttune'
            yield Finding("api-mismatch", "error", subject, entry.reason, fix)
        elif entry.status == "duplicate":
            fix = f"pip uninstall {owner}, or {BLOCK_VARIABLE}={owner} posttune run ..."
            yield Finding("name-twice", "error", subject, entry.reason, fix)
        elif entry.status == "blocked":
            yield Finding("blocked", "info", subject, entry.reason, f"unset {BLOCK_VARIABLE}")


def _requirements(owner: str, closure: Closure, *, named: bool) -> Iterator[Finding]:
    for holder, line in closure.damaged:
        cause = f"the requirement {line!r} of {holder} cannot be read"
        yield Finding("requirement-damaged", "warning", owner, cause, _reinstall(holder))
    for need in closure.missing:
        wanted = f"{need.requirement.name}{need.requirement.specifier}"
        by = f", for {need.holder}" if need.depth > 1 else ""
        code = "engine-missing" if need.engine else "requirement-missing"
        severity = _severity(engine=need.engine, depth=need.depth, named=named)
        yield Finding(code, severity, owner, f"{wanted} is not installed{by}", _fix(owner, need.engine))
    for need, version in closure.conflicting:
        wanted = f"{need.requirement.name}{need.requirement.specifier}"
        by = need.holder if need.depth > 1 else "it"
        cause = f"{need.requirement.name} {version} is installed, and {by} requires {wanted}"
        code = "engine-conflict" if need.engine else "requirement-conflict"
        severity = _severity(engine=need.engine, depth=need.depth, named=named)
        yield Finding(code, severity, owner, cause, _fix(owner, need.engine))


def _severity(*, engine: bool, depth: int, named: bool) -> Severity:
    """What lies deeper may never be used; an engine that nobody named need not be there."""
    return "error" if depth == 1 and (named or not engine) else "warning"


def _fix(owner: str, engine: bool) -> str:
    return f'pip install "{owner}[{metadata.ENGINE}]"' if engine else f'pip install "{owner}"'


def _reinstall(owner: str) -> str:
    return f"pip install --force-reinstall {owner}, or tell its author"


def _pins(inventory: Inventory, wanted: Sequence[str], every: Sequence[str]) -> Iterator[Finding]:
    """Pairs of plugins whose requirements on one package exclude each other."""
    asked = {owner: _asked(inventory.closure(owner)) for owner in every if owner != CORE}
    for first, second in combinations(asked, 2):
        if first not in wanted and second not in wanted:
            continue
        for package in sorted(asked[first].keys() & asked[second].keys()):
            left, right = asked[first][package], asked[second][package]
            if left != right and disjoint(left, right):
                cause = f"{first} requires {package}{left}, and {second} {package}{right}"
                fix = f'one environment each: python -m venv a && a/bin/pip install "{first}[engine]"'
                yield Finding("pins-disjoint", "warning", f"{first} and {second}", cause, fix)


def _asked(closure: Closure) -> dict[str, SpecifierSet]:
    """The range of every package that a plugin and what it brings ask for."""
    ranges: dict[str, SpecifierSet] = {}
    for need in closure.needs:
        name = canonicalize_name(need.requirement.name)
        ranges[name] = ranges.get(name, SpecifierSet()) & need.requirement.specifier
    return {name: found for name, found in ranges.items() if str(found)}


def offered(inventory: Inventory, owner: str) -> list[tuple[str, str]]:
    """Kind and name of every plugin of a distribution; commands are not among them."""
    distribution = inventory.get(owner)
    points = _points(distribution) if distribution is not None else []
    return [
        (point.group.removeprefix("posttune."), point.name)
        for point in points
        if point.group != COMMAND_GROUP
    ]


def described(inventory: Inventory, owner: str) -> str:
    """A distribution and its version."""
    distribution = inventory.get(owner)
    return f"{owner} {version_of(distribution)}" if distribution is not None else owner
