"""What is left to do in a run folder, and whether the configuration still fits what was done."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from posttune.config.models import STAGES, RunConfig
from posttune.config.validate import references
from posttune.errors import UserError
from posttune.run.folder import RunFolder, StageMarker

Action = Literal["run", "continue", "skip"]


@dataclass(frozen=True)
class Step:
    """A stage of the plan. ``marker`` is what an earlier run left of it."""

    name: str
    action: Action
    marker: StageMarker | None


def make_plan(config: RunConfig, folder: RunFolder, resume: bool) -> list[Step]:
    """What to do with each stage, in order. Raises UserError where the folder does not fit."""
    if not resume:
        _refuse_used(folder)
        return [Step(name, "run", None) for name in config.stages]
    steps = [_step(config, folder, name) for name in config.stages]
    _refuse_stale(config, folder, steps)
    return steps


def stage_settings(config: RunConfig, name: str) -> dict[str, Any]:
    """Everything that decides what a stage computes: its configuration and the run's seed."""
    return {**config.told()["stages"][name], "seed": config.seed}


def digest(settings: Mapping[str, Any]) -> str:
    """A fingerprint of plain data."""
    text = json.dumps(settings, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The fields that differ, each as ``a.b: old -> new``."""
    before, after = dict(_flat(old)), dict(_flat(new))
    keys = [*before, *(key for key in after if key not in before)]
    return [
        f"{key}: {_shown(before, key)} -> {_shown(after, key)}"
        for key in keys
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
    ]


_ABSENT = object()
MAY_CHANGE = ("checkpoint.",)
"""Settings that change nothing in what a stage computes."""


def _telling(changed: list[str]) -> list[str]:
    return [change for change in changed if not change.startswith(MAY_CHANGE)]


def _refuse_used(folder: RunFolder) -> None:
    if folder.path.exists() and not folder.path.is_dir():
        raise UserError("is a file, not a folder", who=str(folder.path), fix="choose another output:")
    if folder.holds_run():
        fix = "--resume goes on with that run; output=DIR begins a new one elsewhere"
        raise UserError("holds a run already", who=str(folder.path), fix=fix)


def _step(config: RunConfig, folder: RunFolder, name: str) -> Step:
    marker = folder.read_marker(name)
    if marker is None:
        return Step(name, "run", None)
    changed = _telling(changes(_completed(marker), stage_settings(config, name)))
    if marker.status != "finished":
        began = folder.last_checkpoint_step() > marker.first_checkpoint
        if changed and began:
            _refuse_changed(folder, name, changed, "has checkpoints")
        return Step(name, "run" if changed else "continue", marker)
    if changed:
        _refuse_changed(folder, name, changed, "is finished")
    if marker.output is not None and not folder.restored(marker.output).exists():
        what = f"stage {name!r} is finished, but its output {marker.output} is gone"
        fix = f"put it back, or remove {folder.stages / name}.json to run the stage again"
        raise UserError(what, who=str(folder.path), fix=fix)
    return Step(name, "skip", marker)


def _refuse_changed(folder: RunFolder, name: str, changed: list[str], state: str) -> None:
    listed = "".join(f"\n    {change}" for change in changed)
    what = f"stage {name!r} {state}, and its configuration has changed since:{listed}"
    fix = "undo the change to resume, or begin a new run with another output:"
    raise UserError(what, who=str(folder.path), fix=fix)


def _refuse_stale(config: RunConfig, folder: RunFolder, steps: list[Step]) -> None:
    """A finished stage must not rest on one that is to run again."""
    fresh = {step.name for step in steps if step.action != "skip"}
    for step in steps:
        used = {reference.value for reference in references(config.stages[step.name].model_dump())}
        if step.action == "skip" and used & fresh:
            what = f"stage {step.name!r} is finished, but {min(used & fresh)!r}, on which it rests, is not"
            fix = f"remove {folder.stages / step.name}.json too, or begin a new run with another output:"
            raise UserError(what, who=str(folder.path), fix=fix)


def _completed(marker: StageMarker) -> dict[str, Any]:
    """The marker's settings, with the defaults of options that came with a later version."""
    old = dict(marker.config)
    seed = old.pop("seed", None)
    try:
        filled = STAGES[marker.kind].model_validate(old).model_dump(mode="json")
    except (ValidationError, KeyError):
        filled = old
    return {**filled, "seed": seed}


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and (value or not path):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _flat(item, f"{path}.{index}")
    else:
        yield path, value


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return json.dumps(flat[key], ensure_ascii=False) if key in flat else "absent"
