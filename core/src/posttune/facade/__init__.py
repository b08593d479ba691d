"""The only callers of hooks: one typed method per hook, and every return checked.

``build_*`` takes plugin references of a configuration and returns a facade. Each raises what
``posttune.pipeline.compose`` raises, PluginCallError where a hook raises, and PluginReturnError
where a hook returns what its contract forbids.
"""

from __future__ import annotations

from collections.abc import Sequence

from posttune.config.models import PluginRef
from posttune.facade.algorithms import Estimator, PolicyLoss
from posttune.facade.converter import Converter
from posttune.facade.exporter import Exporter
from posttune.facade.manager import RewardManager
from posttune.facade.observers import Observers
from posttune.facade.rewards import Rewards, RewardStats, Scoring
from posttune.facade.rollout import RolloutEngine
from posttune.pipeline import compose, compose_wrapped

__all__ = [
    "Converter",
    "Estimator",
    "Exporter",
    "Observers",
    "PolicyLoss",
    "RewardManager",
    "RewardStats",
    "Rewards",
    "RolloutEngine",
    "Scoring",
    "build_converter",
    "build_estimator",
    "build_exporter",
    "build_loss",
    "build_manager",
    "build_observers",
    "build_rewards",
    "build_rollout",
]


def build_rollout(ref: PluginRef) -> RolloutEngine:
    """A rollout engine, not yet started."""
    return RolloutEngine(*compose("rollout_backend", [ref]))


def build_estimator(ref: PluginRef) -> Estimator:
    """An advantage estimator."""
    return Estimator(*compose("advantage_estimator", [ref]))


def build_loss(ref: PluginRef) -> PolicyLoss:
    """A policy loss."""
    return PolicyLoss(*compose("policy_loss", [ref]))


def build_rewards(refs: Sequence[PluginRef]) -> Rewards:
    """All rewards of a stage, in order."""
    return Rewards(compose("reward", refs), refs)


def build_manager(ref: PluginRef, wrappers: Sequence[PluginRef] = ()) -> RewardManager:
    """A reward manager, perhaps wrapped by others: the first wrapper is the outermost."""
    return RewardManager(compose_wrapped("reward_manager", ref, wrappers))


def build_converter(ref: PluginRef) -> Converter:
    """A data converter."""
    return Converter(*compose("data_converter", [ref]))


def build_exporter(ref: PluginRef) -> Exporter:
    """A checkpoint exporter."""
    return Exporter(*compose("checkpoint_exporter", [ref]))


def build_observers(refs: Sequence[PluginRef]) -> Observers:
    """All observers of a run, in order."""
    return Observers(compose("observer", refs))
