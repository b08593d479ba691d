"""Rewards that a script hands over as Python objects: functions, instances, or several with labels."""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from posttune.config.models import PluginRef, RewardRef
from posttune.config.trainer_options import RewardOptions
from posttune.errors import ConfigError, Problem, UserError
from posttune.execution.main_module import refuse_main
from posttune.facade import Rewards
from posttune.nearest import nearest
from posttune.pipeline import Member, bind, compose
from posttune.reward.function import FunctionReward

log = logging.getLogger("posttune.reward")
_said = threading.Event()

Weight = float | Mapping[str, float]
FIX = "give a function (prompt, response), an instance of BaseRewardFunction, or a list or dict of them"


@dataclass(frozen=True)
class GivenRewards:
    """What a script gave: the rewards, how a configuration names them, and their weights by label."""

    rewards: Rewards
    refs: list[RewardRef]
    weights: dict[str, float]


def given_rewards(given: object, options: RewardOptions) -> GivenRewards:
    """Make rewards of one object, or of a list or dict (by label) of objects, each perhaps with a weight.

    A weight is a number, or a mapping that weighs the reward's dimensions. It stands in ``weights`` by
    label, or beside the object: ``(reward, weight)``. Of a single object ``weights`` may also name the
    dimensions. ``execution`` and ``execution_of`` say how they are executed. Raises UserError and
    ConfigError.
    """
    found = list(_entries(given))
    several, weights = isinstance(given, list | Mapping), options.weights
    by_label = _weights({each.label: each.weight for each in found}, weights, several=several)
    made = [_made(each, by_label.get(each.label)) for each in found]
    numbers = {label: float(weight) for label, weight in by_label.items() if not isinstance(weight, Mapping)}
    refs = _executed([ref for _, ref in made], options)
    for entry, ref in zip(found, refs, strict=True):
        _refuse_or_say(entry, ref)
    return GivenRewards(Rewards([member for member, _ in made], refs), refs, numbers)


def _executed(refs: Sequence[PluginRef], options: RewardOptions) -> list[RewardRef]:
    """The references with how each is executed. Raises ConfigError."""
    labels = [ref.tag for ref in refs]
    for label in options.execution_of:
        if label not in labels:
            what = f"no reward has that label; they are {', '.join(labels)}"
            path = f"config.reward.execution_of.{label}"
            raise ConfigError([Problem(path, what, suggestion=nearest(label, labels))])
    chosen = [options.execution_of.get(label, options.execution) for label in labels]
    return [
        RewardRef(**ref.model_dump() | execution.model_dump())
        for ref, execution in zip(refs, chosen, strict=True)
    ]


def _refuse_or_say(entry: _Entry, ref: RewardRef) -> None:
    """Refuse a process for what none could make again; say once of what is the script's own that none is."""
    if ref.executor != "process":
        if "<" in ref.options.get("path", "") or ref.options.get("path", "").startswith("__main__:"):
            _say_once(ref.tag)
        return
    refuse_main(ref)
    owner = getattr(entry.reward, "__self__", entry.reward)
    made_by_name = isinstance(entry.reward, str) or ref.name != "function" or _is_plain(owner)
    if not made_by_name:
        what = f"its {type(owner).__name__} holds a state that no worker process could make again"
        fix = "give a function of a module, install the class as a plugin, or set executor: thread"
        raise UserError(what, who=f"reward {ref.tag!r}", fix=fix)


def _is_plain(owner: object) -> bool:
    """Whether importing its module is all that a worker needs: a function, or a class without options."""
    if inspect.isroutine(owner) or inspect.ismodule(owner):
        return True
    state = {name: value for name, value in getattr(owner, "__dict__", {}).items() if name != "config"}
    config = getattr(owner, "config", None)
    return (
        hasattr(owner, "compute_reward")
        and not state
        and not (isinstance(config, BaseModel) and dict(config))
    )


def _say_once(label: str) -> None:
    if not _said.is_set():
        _said.set()
        log.warning(
            "reward %r is the running script's own: it runs in a thread of this process, where a call that "
            "hangs cannot be killed; in a file of its own it can have executor: process",
            label,
        )


@dataclass(frozen=True)
class _Entry:
    label: str
    reward: Any
    weight: Weight | None


def _entries(given: object) -> Iterator[_Entry]:
    named: list[tuple[str | None, object]]
    if isinstance(given, Mapping):
        named = [(str(label), each) for label, each in given.items()]
    else:
        named = [(None, each) for each in (given if isinstance(given, list) else [given])]
    if not named:
        raise UserError("names no reward", who="reward_fn", fix=FIX)
    entries = [_entry(label, each) for label, each in named]
    for label, count in Counter(entry.label for entry in entries).items():
        if count > 1:
            fix = "give a dict, whose keys are the labels: {'first': f, 'second': g}"
            raise UserError(f"{count} rewards are called {label!r}", who="reward_fn", fix=fix)
    yield from entries


def _entry(label: str | None, each: object) -> _Entry:
    weight: Weight | None = None
    if isinstance(each, tuple):
        if len(each) != 2 or isinstance(each[1], bool) or not isinstance(each[1], int | float | Mapping):
            raise UserError("a tuple is (reward, weight)", who="reward_fn", fix="write [(f, 0.7), (g, 0.3)]")
        each, weight = each
    return _Entry(label or _label(each), each, weight)


def _label(reward: object) -> str:
    """The name of a function, the plugin's name of an instance, or its class's."""
    if isinstance(reward, str):
        return reward
    if inspect.isroutine(reward):
        return "reward" if reward.__name__ == "<lambda>" else reward.__name__
    return _plugin_name(type(reward)) or type(reward).__name__


def _weights(
    beside: Mapping[str, Weight | None], weights: Mapping[str, Weight], *, several: bool
) -> dict[str, Weight]:
    """The weights by label, those beside the rewards and those of the configuration."""
    only = next(iter(beside))
    if weights and not several and set(weights) != {only}:
        weights = {only: {name: _number(name, weight) for name, weight in weights.items()}}
    found = {label: weight for label, weight in beside.items() if weight is not None}
    for label, weight in weights.items():
        path = f"config.reward.weights.{label}"
        if label not in beside:
            what = f"no reward has that label; they are {', '.join(beside)}"
            raise ConfigError([Problem(path, what, suggestion=nearest(label, beside))])
        if label in found:
            raise ConfigError([Problem(path, "reward_fn gives it a weight too; keep one of the two")])
        found[label] = weight
    return found


def _number(name: str, weight: Weight) -> float:
    if isinstance(weight, Mapping):
        what = "of a single reward_fn, weights name its dimensions: each is a number"
        raise ConfigError([Problem(f"config.reward.weights.{name}", what)])
    return weight


def _made(entry: _Entry, weight: Weight | None) -> tuple[Member, PluginRef]:
    dimensions = dict(weight) if isinstance(weight, Mapping) else None
    reward = entry.reward
    if isinstance(reward, str):
        ref = PluginRef(name=reward, label=entry.label)
        if dimensions is not None:
            what = f"reward {reward!r} is named, and only options of its own can weigh its dimensions"
            raise UserError(what, who="reward_fn", fix="give it one number as weight")
        return compose("reward", [ref])[0], ref
    function = _function(reward)
    ref = _ref(entry, function, dimensions)
    if function is None or (dimensions is None and hasattr(reward, "reward_score")):
        return bind("reward", reward, entry.label), ref
    made = FunctionReward.of(function, str(_path(function)), dimensions)
    return bind("reward", made, entry.label), ref


def _function(reward: object) -> Callable[..., Any] | None:
    """What judges; None where the object is a plugin that scores samples itself."""
    if inspect.isclass(reward):
        fix = f"give an instance: reward_fn={reward.__name__}()"
        raise UserError(f"{reward.__name__} is a class", who="reward_fn", fix=fix)
    for name in ("compute_reward", "reward_score"):
        if callable(getattr(reward, name, None)):
            return getattr(reward, name) if name == "compute_reward" else None
    if not callable(reward):
        raise UserError(f"a {type(reward).__name__} judges nothing", who="reward_fn", fix=FIX)
    return reward


def _ref(
    entry: _Entry, function: Callable[..., Any] | None, dimensions: Mapping[str, float] | None
) -> PluginRef:
    """How a configuration would name the reward. It is recorded with the run, and must stay for a resume."""
    config = getattr(entry.reward, "config", None)
    options = config.model_dump(mode="json") if isinstance(config, BaseModel) else {}
    name = None if inspect.isroutine(entry.reward) else _plugin_name(type(entry.reward))
    if name is None:
        name, options = "function", {"path": _path(function or entry.reward), **options}
    if dimensions is not None:
        options = {**options, "weights": dict(dimensions)}
    return PluginRef(name=name, label=entry.label, options=options)


def _path(function: object) -> str:
    """``module:name``, of a bound method its class's."""
    owner = getattr(function, "__self__", None)
    named = type(owner) if owner is not None and not inspect.ismodule(owner) else function
    if not hasattr(named, "__qualname__"):
        named = type(named)
    return f"{getattr(named, '__module__', '?')}:{getattr(named, '__qualname__', '?')}"


def _plugin_name(cls: type) -> str | None:
    """The name under which the class is installed as a reward. Imports nothing."""
    package = cls.__module__.partition(".")[0]
    for point in importlib.metadata.entry_points(group="posttune.reward"):
        module, _, name = point.value.partition(":")
        if name == cls.__qualname__ and module.partition(".")[0] == package:
            return point.name
    return None
