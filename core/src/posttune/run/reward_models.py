"""Rewards whose model an earlier stage trains: the stage's name becomes its folder when the stage has run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from posttune.config.models import EvaluateStage, PluginRef, RlStage, SftStage, Stage, ValidationConfig
from posttune.config.validate import MODEL_REWARD


def named_stage(ref: PluginRef) -> str | None:
    """What a reward `model` names as its path, which may be a stage; None for other rewards."""
    path = ref.options.get("path") if ref.name == MODEL_REWARD else None
    return path if isinstance(path, str) else None


def with_outputs(stage: Stage, outputs: Mapping[str, Path]) -> Stage:
    """The stage with the folders of earlier stages in the place of their names, in its rewards."""
    changed: dict[str, object] = {}
    if isinstance(stage, RlStage | EvaluateStage):
        changed["rewards"] = _resolved(stage.rewards, outputs)
    if isinstance(stage, SftStage | RlStage) and stage.evaluate is not None:
        rewards = _resolved(stage.evaluate.rewards, outputs)
        changed["evaluate"] = ValidationConfig.model_copy(stage.evaluate, update={"rewards": rewards})
    return stage.model_copy(update=changed)


def _resolved(refs: Sequence[PluginRef], outputs: Mapping[str, Path]) -> list[PluginRef]:
    return [_one(ref, outputs) for ref in refs]


def _one(ref: PluginRef, outputs: Mapping[str, Path]) -> PluginRef:
    folder = outputs.get(named_stage(ref) or "")
    if folder is None:
        return ref
    return ref.model_copy(update={"options": {**ref.options, "path": str(folder)}})
