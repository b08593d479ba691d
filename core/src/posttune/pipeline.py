"""Plugins by name and options, made into instances that honour their contract.

Each configured instance is registered with a private pluggy manager: nothing is global, the order
is the configuration's, and a call has one owner. One manager for several instances would need
instances that can be told apart and hashed, which two equal dataclasses cannot.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, get_args

import pluggy
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from posttune.catalog import Catalog
from posttune.config.models import PluginRef
from posttune.config.problems import describe_error, suggest_key
from posttune.errors import (
    ConfigError,
    PluginCallError,
    PluginContractError,
    PluginId,
    PluginLoadError,
    PluginOptionsError,
    PluginReturnError,
    PosttuneError,
    Problem,
)
from posttune.hooks import faults, hooks_of
from posttune.hookspecs import PROJECT
from posttune.kinds import KINDS


class NoOptions(BaseModel):
    """The options of a plugin that has no ``Config``: none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, eq=False)
class Member:
    """A configured instance. All calls of its hooks go through here."""

    id: PluginId
    config: BaseModel
    manager: pluggy.PluginManager

    @property
    def label(self) -> str:
        """What metrics, columns and messages call it."""
        return self.id.label or self.id.name

    def implements(self, hook: str) -> bool:
        """Whether the plugin has this hook; only an optional one can be absent."""
        return bool(getattr(self.manager.hook, hook).get_hookimpls())

    def call(self, hook: str, /, **arguments: object) -> Any:
        """Call a hook. None where the plugin has no such hook or returned None.

        An error of posttune itself passes unchanged; any other becomes PluginCallError.
        """
        return self.call_about(hook, "", **arguments)

    def call_about(self, hook: str, about: str, /, **arguments: object) -> Any:
        """As ``call``; the message of an error ends with ``about``."""
        try:
            result = getattr(self.manager.hook, hook)(**arguments)
        except (KeyboardInterrupt, PosttuneError):
            raise
        except BaseException as error:  # SystemExit too: a hook cannot end the run
            raise self.failed(hook, error, about) from error
        if hooks_of(self.id.kind)[hook].firstresult:
            return result
        return result[0] if result else None

    def failed(self, hook: str, error: BaseException, about: str = "") -> PluginCallError:
        """The error for a hook that raised."""
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        what = f"{hook} raised {type(error).__name__}: {error}{notes}{about}"
        fix = "mend what it runs (POSTTUNE_TRACEBACK=1 shows where)"
        if not notes.startswith(" (at "):  # else the place is the user's own
            fix += f", or tell {self.author}"
        return PluginCallError(what, plugin=self.id, fix=fix)

    def wrong(self, hook: str, what: str) -> PluginReturnError:
        """The error for a hook that returned what its contract forbids."""
        hint = hooks_of(self.id.kind)[hook].summary
        return PluginReturnError(f"{hook} returned {what}", plugin=self.id, fix=f"its contract: {hint}")

    @property
    def author(self) -> str:
        """Who can mend it."""
        return f"the author of {self.id.distribution}" if self.id.distribution else "its author"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self.id} cannot be pickled: send its configuration, and compose it again")


def compose(kind: str, refs: Sequence[PluginRef], *, catalog: Catalog | None = None) -> tuple[Member, ...]:
    """One instance per reference, in order. Labels are unique within the kind.

    Raises ConfigError for two equal labels, and whatever ``Catalog.load``, ``validate_options``
    and the contract's check raise.
    """
    _refuse_equal_labels(kind, refs)
    catalog = catalog or Catalog()
    members = []
    for ref in refs:
        who, config, instance = _create(kind, ref, catalog)
        members.append(_member(who, config, instance))
    return tuple(members)


def compose_wrapped(kind: str, ref: PluginRef, wrappers: Sequence[PluginRef]) -> Member:
    """One instance, wrapped by others: the first wrapper is the outermost."""
    catalog = Catalog()
    _refuse_equal_labels(kind, [ref, *wrappers])
    member = _member(*_create(kind, ref, catalog))
    for wrapper in reversed(wrappers):  # pluggy calls the last registered first
        owner, _config, around = _create(kind, wrapper, catalog)
        _register(member.manager, around, owner)
    _check_wrapping(member)
    return member


def bind(kind: str, instance: object, name: str) -> Member:
    """An instance that was made by hand, its hooks checked. For use without an entry point."""
    who = PluginId(kind, name)
    _check_hooks(type(instance), who)
    return _member(who, NoOptions(), instance)


def load_plugin(kind: str, name: str, catalog: Catalog | None = None) -> type:
    """The class that a name means, its hooks and its ``Config`` checked."""
    catalog = catalog or Catalog()
    plugin = catalog.load(kind, name)
    who = catalog.check(kind, name, engine=False)
    _check_hooks(plugin, who)
    _config_of(plugin, who)
    return plugin


def options_model(kind: str, name: str, catalog: Catalog | None = None) -> type[BaseModel]:
    """The pydantic model of a plugin's options; ``NoOptions`` where it has no ``Config``."""
    catalog = catalog or Catalog()
    return _config_of(load_plugin(kind, name, catalog), catalog.check(kind, name, engine=False))


def validate_options(kind: str, ref: PluginRef, catalog: Catalog | None = None) -> BaseModel:
    """The plugin's options, validated by its ``Config``. Raises PluginOptionsError, all problems in it."""
    catalog = catalog or Catalog()
    who = replace(catalog.check(kind, ref.name, engine=False), label=ref.label or "")
    config = _validate(options_model(kind, ref.name, catalog), ref.options, who)
    _check_engine(kind, ref.name, config, catalog)
    return config


def _check_engine(kind: str, name: str, config: BaseModel, catalog: Catalog) -> None:
    """Refuse a plugin whose engine is not installed, unless with these options it drives one elsewhere."""
    if getattr(config, "needs_engine", True):
        catalog.check(kind, name)


def models_in(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A pydantic model and all models that its fields hold."""
    seen: list[type[BaseModel]] = []
    waiting = [model]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.append(current)
        yield current
        for info in current.model_fields.values():
            waiting += _models_of(info.annotation)


def _models_of(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_of(argument)]


def _check_hooks(plugin: type, who: PluginId) -> None:
    found = faults(who.kind, plugin)
    if found:
        fix = f"mend {plugin.__module__}.{plugin.__qualname__}; the hooks stand in posttune.hookspecs"
        raise PluginContractError("; ".join(found), plugin=who, fix=fix)


def _config_of(plugin: type, who: PluginId) -> type[BaseModel]:
    config = getattr(plugin, "Config", None)
    if config is None:
        return NoOptions
    fix = 'let Config be a pydantic.BaseModel with model_config = ConfigDict(extra="forbid")'
    if not (isinstance(config, type) and issubclass(config, BaseModel)):
        raise PluginContractError("its Config is not a pydantic model", plugin=who, fix=fix)
    for model in models_in(config):
        if model.model_config.get("extra") != "forbid":
            what = f"{model.__qualname__} accepts unknown options, so that a typo would pass"
            raise PluginContractError(what, plugin=who, fix=fix)
    return config


def _create(kind: str, ref: PluginRef, catalog: Catalog) -> tuple[PluginId, BaseModel, object]:
    plugin = load_plugin(kind, ref.name, catalog)
    who = replace(catalog.check(kind, ref.name, engine=False), label=ref.label or "")
    model = _config_of(plugin, who)
    config = _validate(model, ref.options, who)
    _check_engine(kind, ref.name, config, catalog)
    arguments = () if model is NoOptions else (config,)
    _check_constructor(plugin, arguments, who)
    try:
        return who, config, plugin(*arguments)
    except (KeyboardInterrupt, PosttuneError):
        raise
    except BaseException as error:
        what = f"creating {plugin.__qualname__} raised {type(error).__name__}: {error}"
        fix = "an __init__ should only keep its config: move work into the hooks"
        raise PluginLoadError(what, plugin=who, fix=fix) from error


def _check_constructor(plugin: type, arguments: tuple[BaseModel, ...], who: PluginId) -> None:
    wanted = "__init__(self, config)" if arguments else "no arguments, as it has no Config"
    try:
        inspect.signature(plugin).bind(*arguments)
    except TypeError as error:
        what = f"{plugin.__qualname__} cannot be created: {error}"
        raise PluginContractError(what, plugin=who, fix=f"let its constructor take {wanted}") from error
    except ValueError:
        return  # a class written in C may have no signature


def _member(who: PluginId, config: BaseModel, instance: object) -> Member:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(KINDS[who.kind].spec)
    _register(manager, instance, who)
    return Member(who, config, manager)


def _check_wrapping(member: Member) -> None:
    """Exactly one plugin does the work: the one that is not named as a wrapper."""
    for hook in hooks_of(member.id.kind):
        implementations = getattr(member.manager.hook, hook).get_hookimpls()
        workers = [each.plugin_name for each in implementations if not each.wrapper]
        if workers != [member.label]:
            what = (
                f"{hook} is done by {' and '.join(workers) or 'none'}, and should be by {member.label} alone"
            )
            fix = "name a plugin that does the work itself, and as wrappers those with wrapper=True"
            raise PluginContractError(what, plugin=member.id, fix=fix)


def _register(manager: pluggy.PluginManager, instance: object, who: PluginId) -> None:
    """pluggy's own check is the last word: ``faults`` explains more, and sees the class only."""
    try:
        manager.register(instance, name=who.label or who.name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        fix = "compare its hooks with posttune.hookspecs"
        raise PluginContractError(str(error), plugin=who, fix=fix) from error


def _refuse_equal_labels(kind: str, refs: Sequence[PluginRef]) -> None:
    tags = [ref.tag for ref in refs]
    problems = [
        Problem(path=f"{kind}.{tag}", message=f"{tags.count(tag)} plugins of this kind are labelled {tag!r}")
        for tag in dict.fromkeys(tags)
        if tags.count(tag) > 1
    ]
    if problems:
        raise ConfigError(
            problems, fix="give each a label of its own, as in {name: function, label: brevity}"
        )


def _validate(model: type[BaseModel], options: Mapping[str, Any], who: PluginId) -> BaseModel:
    try:
        return model.model_validate(options)
    except ValidationError as error:
        problems = [_problem(model, detail) for detail in error.errors(include_url=False)]
        names = ", ".join(model.model_fields) or "none"
        fix = f"its options are: {names} (`posttune plugins show {who.kind} {who.name}`)"
        raise PluginOptionsError(problems, plugin=who, fix=fix) from error
    except Exception as error:
        problem = Problem("options", f"its Config raised {type(error).__name__}: {error}")
        raise PluginOptionsError([problem], plugin=who, fix="mend the options, or the plugin") from error


def _problem(model: type[BaseModel], detail: ErrorDetails) -> Problem:
    location = detail["loc"]
    path = ".".join(["options", *map(str, location)])
    if detail["type"] == "extra_forbidden":
        holder = _model_at(model, location[:-1])
        return Problem(path, "unknown option", suggestion=suggest_key(str(location[-1]), holder))
    return Problem(path, describe_error(detail))


def _model_at(model: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel]:
    """The model that describes the options at a location."""
    for part in location:
        info = model.model_fields.get(str(part))
        inner = _models_of(info.annotation) if info is not None else []
        model = inner[0] if inner else model
    return model
