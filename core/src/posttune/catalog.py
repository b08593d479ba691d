"""Which plugins are installed, and which one a name means.

Listing reads metadata only. Loading imports one module: that of the plugin that was named.
"""

from __future__ import annotations

import importlib
import json
import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import Distribution, EntryPoint
from importlib.resources import files
from typing import Any, Literal, cast

from packaging.requirements import InvalidRequirement
from packaging.utils import canonicalize_name
from stevedore.named import NamedExtensionManager

from posttune import metadata
from posttune._version import __version__
from posttune.errors import (
    ApiMismatch,
    BlockedPlugin,
    DuplicatePlugin,
    PluginContractError,
    PluginError,
    PluginId,
    PluginLoadError,
    UnknownPlugin,
    UserError,
)
from posttune.kinds import COMMAND_GROUP, KINDS
from posttune.metadata import Owner
from posttune.nearest import nearest

Status = Literal[
    "ready", "engine missing", "engine conflict", "api mismatch", "duplicate", "blocked", "broken"
]
COMMAND = "command"
BLOCK_VARIABLE = "POSTTUNE_BLOCK"

_ERRORS: dict[Status, type[PluginError]] = {
    "engine missing": PluginLoadError,
    "engine conflict": PluginLoadError,
    "api mismatch": ApiMismatch,
    "duplicate": DuplicatePlugin,
    "blocked": BlockedPlugin,
}
_ENGINE: tuple[Status, ...] = ("engine missing", "engine conflict")


@dataclass(frozen=True)
class Entry:
    """One installed entry point. ``api`` is its distribution's requirement on posttune."""

    kind: str
    name: str
    distribution: str
    version: str
    api: str
    status: Status
    reason: str

    @property
    def id(self) -> PluginId:
        """Who the plugin is."""
        return PluginId(self.kind, self.name, self.distribution, self.version)


class KindManager(NamedExtensionManager[Any]):
    """Loads one named entry point of one kind, and lets every error of its import through.

    stevedore's own listing comes from a cache on disk that can be stale for minutes after an
    install, so it is given the catalog's entry points.
    """

    def __init__(self, group: str, name: str, points: list[EntryPoint]) -> None:
        self._points = points
        super().__init__(
            group,
            names=[name],
            on_load_failure_callback=_raise_unchanged,
            on_missing_entrypoints_callback=None,
        )

    def list_entry_points(self) -> list[EntryPoint]:
        """The entry points that may be loaded, sorted."""
        return self._points


def _raise_unchanged(_manager: object, _point: EntryPoint, error: BaseException) -> None:
    raise error


class Catalog:
    """What was installed when it was made. ``environ`` is where POSTTUNE_BLOCK is read."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        value = (os.environ if environ is None else environ).get(BLOCK_VARIABLE, "")
        self._blocked = frozenset(part.strip() for part in value.split(",") if part.strip())
        self._blocked_owners = {canonicalize_name(blocked) for blocked in self._blocked}
        self._installed = metadata.entry_points(*(kind.group for kind in KINDS.values()), COMMAND_GROUP)
        self._owners: dict[Distribution | None, Owner] = {}

    def entries(self, kind: str | None = None) -> list[Entry]:
        """Every installed plugin of a kind, or of all kinds, with its status; nothing is imported."""
        kinds = list(KINDS) if kind is None else [kind]
        return [entry for each in kinds for entry in self._entries(each)]

    def entry(self, kind: str, name: str) -> Entry:
        """The plugin that a name means, whatever its status. Raises UnknownPlugin."""
        found = [entry for entry in self._entries(kind) if entry.name == name]
        if not found:
            raise self._unknown(kind, name)
        return next((entry for entry in found if entry.status != "blocked"), found[0])

    def check(self, kind: str, name: str, *, engine: bool = True) -> PluginId:
        """Refuses a plugin for whatever can be known without importing it.

        ``engine`` False: its class, options and documentation are wanted, which need no engine.
        """
        entry = self.entry(kind, name)
        if entry.status in _ERRORS and (engine or entry.status not in _ENGINE):
            what, fix = entry.reason, _advice(entry)
            raise _ERRORS[entry.status](what, plugin=entry.id, fix=fix)
        return entry.id

    def load(self, kind: str, name: str) -> type:
        """The plugin's class, its engine there or not. Imports its module, and no other plugin's.

        Raises UnknownPlugin, DuplicatePlugin, BlockedPlugin, ApiMismatch, PluginLoadError, and
        PluginContractError where the entry point names something else than a class.
        """
        loaded = self.load_object(kind, name)
        if not isinstance(loaded, type):
            raise PluginContractError(
                f"its entry point names a {type(loaded).__name__}, not a class",
                plugin=self.check(kind, name),
                fix="let the entry point name the plugin's class, as in package.module:Class",
            )
        return loaded

    def load_object(self, kind: str, name: str) -> object:
        """What an entry point names: a class, or a command of the kind ``command``."""
        plugin = self.check(kind, name, engine=False)
        try:
            allowed = [point for point in self._points(kind) if self._allowed(point)]
            manager = KindManager(_group(kind), name, allowed)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit and all else: an import may raise anything
            raise _load_error(plugin, self._point(kind, name), error) from error
        return cast("object", manager[name].plugin)

    def _points(self, kind: str) -> list[EntryPoint]:
        group = _group(kind)
        return [point for point in self._installed if point.group == group]

    def _owner(self, point: EntryPoint) -> Owner:
        return self._owners.setdefault(point.dist, Owner(point.dist))

    def _entries(self, kind: str) -> list[Entry]:
        points = self._points(kind)
        rivals: dict[str, list[Owner]] = {}
        for point in points:
            if self._allowed(point):
                rivals.setdefault(point.name, []).append(self._owner(point))
        return [self._entry(kind, point, rivals.get(point.name, [])) for point in points]

    def _entry(self, kind: str, point: EntryPoint, rivals: list[Owner]) -> Entry:
        owner = self._owner(point)
        entry = Entry(kind, point.name, owner.name, owner.version, "", "ready", "")
        if not self._allowed(point):
            return replace(entry, status="blocked", reason=f"{BLOCK_VARIABLE} forbids it")
        entry = _with_requirements(entry, owner)
        if len(rivals) > 1:
            names = " and ".join(f"{rival.name} {rival.version}" for rival in rivals)
            return replace(entry, status="duplicate", reason=f"{names} both offer this name")
        return entry

    def _allowed(self, point: EntryPoint) -> bool:
        if point.name in self._blocked:
            return False
        return (
            not self._blocked or canonicalize_name(metadata.name_of(point.dist)) not in self._blocked_owners
        )

    def _point(self, kind: str, name: str) -> EntryPoint:
        return next(point for point in self._points(kind) if point.name == name and self._allowed(point))

    def _unknown(self, kind: str, name: str) -> UnknownPlugin:
        installed = sorted({entry.name for entry in self._entries(kind)})
        known = known_plugins().get(kind, {})
        what = f"nothing installed bears this name; installed: {', '.join(installed) or 'none'}"
        likely = name if name in known else nearest(name, [*installed, *known])
        if likely and likely != name:
            what += f" (did you mean {likely!r}?)"
        elsewhere = [entry for entry in self.entries() if entry.name == name]
        if likely in known and likely not in installed:
            fix = f'pip install "{known[likely]}"'
        elif elsewhere:
            fix = f"the {elsewhere[0].kind} of this name is another kind of plugin: check where you name it"
        else:
            fix = f"`posttune plugins list --kind {kind}` shows what is installed"
        return UnknownPlugin(what, plugin=PluginId(kind, name), fix=fix)


def _group(kind: str) -> str:
    if kind == COMMAND:
        return COMMAND_GROUP
    if kind not in KINDS:
        likely = nearest(kind, KINDS)
        meant = f" (did you mean {likely!r}?)" if likely else ""
        raise UserError(f"no kind of plugin is called {kind!r}{meant}", fix=f"one of {', '.join(KINDS)}")
    return KINDS[kind].group


def _with_requirements(entry: Entry, owner: Owner) -> Entry:
    """The entry with its API range, and with the status that its requirements give it."""
    try:
        api = owner.api
    except InvalidRequirement as error:
        reason = f"its requirement on posttune is damaged: {error}"
        return replace(entry, status="api mismatch", reason=reason)
    entry = replace(entry, api=str(api))
    if not metadata.accepts(api, __version__):
        reason = f"it requires posttune{api}, and this is posttune {__version__}"
        return replace(entry, status="api mismatch", reason=reason)
    missing, conflicting = owner.engine_faults
    if missing:
        return replace(entry, status="engine missing", reason="; ".join(missing))
    if conflicting:
        return replace(entry, status="engine conflict", reason="; ".join(conflicting))
    return entry


def _advice(entry: Entry) -> str:
    if entry.status in _ENGINE:
        return (
            f'pip install "{entry.distribution}[{metadata.ENGINE}]", in an environment of its own if need be'
        )
    if entry.status == "api mismatch":
        return f'pip install --upgrade "{entry.distribution}" posttune, or install a version that fits'
    if entry.status == "duplicate":
        return f"uninstall one of them, or set {BLOCK_VARIABLE}=<distribution> to leave one out"
    return f"take it out of {BLOCK_VARIABLE}, or name another plugin"


def _load_error(plugin: PluginId, point: EntryPoint, error: BaseException) -> PluginLoadError:
    fix = f"reinstall or upgrade {plugin.distribution}, or report this to its author"
    if not point.pattern.match(point.value):
        what = f"its entry point {point.value!r} does not read module:attribute"
        return PluginLoadError(what, plugin=plugin, fix=fix)
    cause = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        cause = f"it called sys.exit({error.code!r})"
    elif isinstance(error, ModuleNotFoundError) and error.name:
        fix = f"install the module {error.name!r}, or reinstall {plugin.distribution}"
    what = f"loading {point.value} failed{_place(error)}: {cause}"
    return PluginLoadError(what, plugin=plugin, fix=fix)


def _place(error: BaseException) -> str:
    """Where in the imported files the error arose; the frames before the import are ours."""
    names = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    begins = next((at for at, (name, _line) in enumerate(names) if name == importlib.__file__), len(names))
    inside = [f"{name}:{line}" for name, line in names[begins + 1 :] if not name.startswith("<frozen")]
    return f" at {inside[-1]}" if inside else ""


@cache
def known_plugins() -> dict[str, dict[str, str]]:
    """Plugins that exist, by kind and name, with what pip calls them."""
    text = files("posttune").joinpath("known_plugins.json").read_text(encoding="utf-8")
    return cast("dict[str, dict[str, str]]", json.loads(text))
