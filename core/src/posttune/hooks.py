"""What hooks each kind has, and what is wrong with a class that claims to implement them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from posttune._version import API
from posttune.hookspecs import PROJECT
from posttune.kinds import KINDS
from posttune.nearest import nearest

OPTIONAL: dict[str, frozenset[str]] = {
    "rollout_backend": frozenset(
        {"rollout_backend_checksums", "rollout_backend_sleep", "rollout_backend_wake"}
    ),
    "reward": frozenset({"reward_needs"}),
    "observer": frozenset(
        {"observer_run_start", "observer_step", "observer_samples", "observer_checkpoint", "observer_run_end"}
    ),
}
"""Hooks that a plugin may leave out. A plugin without any hook is refused all the same."""

MAY_BE_ASYNC = frozenset({"reward_score"})
MAY_BE_WRAPPED = frozenset({"reward_manager"})


@dataclass(frozen=True)
class Hook:
    """One hook of the specification."""

    name: str
    arguments: tuple[str, ...]
    signature: str
    firstresult: bool
    optional: bool
    summary: str


@cache
def hooks_of(kind: str) -> dict[str, Hook]:
    """The hooks of a kind, by name, in the order of the specification."""
    spec = KINDS[kind].spec
    hooks = {}
    for name, function in vars(spec).items():
        options = getattr(function, f"{PROJECT}_spec", None)
        if options is not None:
            signature = inspect.signature(function)
            hooks[name] = Hook(
                name=name,
                arguments=tuple(signature.parameters)[1:],
                signature=_text(signature),
                firstresult=bool(options["firstresult"]),
                optional=name in OPTIONAL.get(kind, ()),
                summary=(inspect.getdoc(function) or "").partition("\n")[0],
            )
    return hooks


def _text(signature: inspect.Signature) -> str:
    """A signature without self; annotations are the source's own text."""
    parameters = list(signature.parameters.values())[1:]
    listed = ", ".join(f"{each.name}: {each.annotation}" for each in parameters)
    return f"({listed}) -> {signature.return_annotation}"


def signatures() -> dict[str, Any]:
    """Every hook's signature as plain data. A change moves ``posttune.API``; a snapshot test holds it."""
    kinds = {
        kind: {
            hook.name: {
                "signature": hook.signature,
                "firstresult": hook.firstresult,
                "optional": hook.optional,
            }
            for hook in hooks_of(kind).values()
        }
        for kind in KINDS
    }
    return {"api": API, "kinds": kinds}


def faults(kind: str, plugin: type) -> list[str]:
    """What is wrong with the hooks of a class, in words; empty where it honours the contract."""
    marked = dict(_marked(plugin))
    found = [fault for name, method in marked.items() for fault in _method_faults(kind, name, method)]
    found += _unmarked(kind, plugin, marked)
    found += _missing(kind, plugin, marked)
    return found


def implemented(kind: str, plugin: type) -> list[str]:
    """The hooks of the kind that a class implements, in the order of the specification."""
    marked = dict(_marked(plugin))
    return [name for name in hooks_of(kind) if name in marked]


def _marked(plugin: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for attribute, function in _functions(plugin):
        options = getattr(function, f"{PROJECT}_impl", None)
        if isinstance(options, dict):
            yield options.get("specname") or attribute, function


def _functions(plugin: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for attribute in dir(plugin):
        member = inspect.getattr_static(plugin, attribute, None)
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        if inspect.isfunction(member):
            yield attribute, member


def _method_faults(kind: str, name: str, method: Callable[..., Any]) -> Iterator[str]:
    hooks = hooks_of(kind)
    if name not in hooks:
        if not getattr(method, f"{PROJECT}_impl").get("optionalhook"):
            yield _unknown_hook(kind, name)
        return
    yield from _argument_faults(hooks[name], method)
    yield from _form_faults(kind, name, method)


def _unknown_hook(kind: str, name: str) -> str:
    for other in KINDS.values():
        if name in hooks_of(other.name):
            return f"{name} is a hook of the kind {other.name}, not of {kind}"
    likely = nearest(name, hooks_of(kind))
    meant = f"; did you mean {likely}?" if likely else f"; the hooks are {', '.join(hooks_of(kind))}"
    return f"{name} is marked @hookimpl, and {kind} has no such hook{meant}"


def _argument_faults(hook: Hook, method: Callable[..., Any]) -> Iterator[str]:
    for parameter in inspect.signature(method).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            yield f"{hook.name} takes *{parameter.name}, which is never filled; name the arguments it needs"
        elif parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            yield f"{hook.name}: take {parameter.name} as a plain argument, not after a *"
        elif parameter.name not in hook.arguments:
            yield from _wrong_argument(hook, parameter)


def _wrong_argument(hook: Hook, parameter: inspect.Parameter) -> Iterator[str]:
    likely = nearest(parameter.name, hook.arguments)
    if parameter.default is not parameter.empty and not likely:
        return  # its own argument, which keeps its default
    meant = f"; did you mean {likely}?" if likely else ""
    offered = ", ".join(hook.arguments) or "none"
    yield f"{hook.name} has no argument {parameter.name} (it has: {offered}){meant}"


def _form_faults(kind: str, name: str, method: Callable[..., Any]) -> Iterator[str]:
    options = getattr(method, f"{PROJECT}_impl")
    wrapper = options.get("wrapper") or options.get("hookwrapper")
    if options.get("hookwrapper"):
        yield f"{name} is an old-style hookwrapper; use wrapper=True"
    elif wrapper and kind not in MAY_BE_WRAPPED:
        yield f"{name} is a wrapper, and {kind} takes none"
    if wrapper and not inspect.isgeneratorfunction(method):
        yield f"{name} is a wrapper, and must yield once"
    is_async = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
    if is_async and name not in MAY_BE_ASYNC:
        yield f"{name} must not be async"


def _unmarked(kind: str, plugin: type, marked: dict[str, Callable[..., Any]]) -> Iterator[str]:
    for name, _function in _functions(plugin):
        if name in hooks_of(kind) and name not in marked:
            yield f"{name} is a hook but is not marked @hookimpl"


def _missing(kind: str, plugin: type, marked: dict[str, Callable[..., Any]]) -> Iterator[str]:
    hooks = hooks_of(kind)
    methods = {name for name, _function in _functions(plugin)}
    own = [name for name in methods if not name.startswith("_") and name not in hooks]
    for hook in hooks.values():
        if hook.optional or hook.name in methods or hook.name in marked:
            continue
        likely = nearest(hook.name, own)
        meant = f"; did you mean that by {likely}?" if likely and likely not in marked else ""
        yield f"the hook {hook.name}{hook.signature} is missing{meant}"
    if not any(name in hooks for name in marked) and all(hook.optional for hook in hooks.values()):
        yield f"it has no hook at all; {kind} has {', '.join(hooks)}"
