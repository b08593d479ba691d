"""The rewards and the manager of a stage, read from a run's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from posttune.config.load import load_config
from posttune.config.models import EvaluateStage, PluginRef, RewardRef, RlStage, RunConfig
from posttune.errors import UserError
from posttune.nearest import nearest
from posttune.reward.loading import anchored

Ref = TypeVar("Ref", bound=PluginRef)


@dataclass(frozen=True)
class RewardSetup:
    """What judges in a stage. ``manager`` is None where nothing combines the rewards."""

    name: str
    refs: tuple[RewardRef, ...]
    manager: PluginRef | None

    def prefixed(self) -> RewardSetup:
        """The same, with labels that tell its rewards from those of another: ``name/label``."""
        renamed = [RewardRef(**ref.model_dump() | {"label": f"{self.name}/{ref.tag}"}) for ref in self.refs]
        return RewardSetup(self.name, tuple(renamed), self.manager)


def read_setup(spec: str) -> RewardSetup:
    """The rewards of ``FILE`` or ``FILE:STAGE``; without a stage, of the first rl, else evaluate stage.

    Relative paths of functions are looked for beside the file too. Raises ConfigError and UserError.
    """
    path, stage_name = _split(spec)
    loaded = load_config(path)
    stage = _stage(loaded.config, stage_name, path)
    manager = stage.reward_manager if isinstance(stage, RlStage) else None
    refs = tuple(_anchored(ref, loaded.folder) for ref in stage.rewards)
    return RewardSetup(path.stem, refs, manager and _anchored(manager, loaded.folder))


def _anchored(ref: Ref, folder: Path) -> Ref:
    """The reference with the file that it names as found from there: another configuration has another."""
    path = ref.options.get("path")
    if not isinstance(path, str):
        return ref
    return type(ref)(**ref.model_dump() | {"options": {**ref.options, "path": anchored(path, folder)}})


def _split(spec: str) -> tuple[Path, str]:
    head, _, tail = spec.rpartition(":")
    return (Path(head), tail) if head and not Path(spec).exists() else (Path(spec), "")


def _stage(config: RunConfig, name: str, path: Path) -> RlStage | EvaluateStage:
    judged = {
        each: stage for each, stage in config.stages.items() if isinstance(stage, RlStage | EvaluateStage)
    }
    if not judged:
        raise UserError("no stage has rewards", who=str(path), fix="name a configuration with an rl stage")
    if not name:
        first: Sequence[RlStage | EvaluateStage] = sorted(
            judged.values(), key=lambda stage: not isinstance(stage, RlStage)
        )
        return first[0]
    if name not in judged:
        likely = nearest(name, judged)
        hint = f" (did you mean {likely!r}?)" if likely else ""
        what = f"no stage {name!r} with rewards{hint}"
        raise UserError(what, who=str(path), fix=f"stages with rewards: {', '.join(judged)}")
    return judged[name]
