"""The README.md of an exported model: what it is, how to use it, and what its training came to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from posttune._version import __version__

_FIGURES = (
    ("val/accuracy", "accuracy of the validation"),
    ("val/loss", "loss of the validation"),
    ("reward/mean", "mean reward"),
    ("reward/std", "spread of the reward"),
    ("accuracy", "accuracy on the training pairs"),
    ("loss", "loss"),
    ("kl", "KL to the reference"),
    ("entropy", "entropy"),
    ("tokens/completion", "tokens per completion"),
    ("value/explained_variance", "explained variance of the critic"),
)
_SETTINGS = (
    ("model", "base model"),
    ("data", "data"),
    ("advantage.name", "advantages"),
    ("loss.name", "policy loss"),
    ("optimizer.lr", "learning rate"),
    ("steps", "steps asked for"),
    ("epochs", "epochs asked for"),
)


@dataclass(frozen=True)
class RunPlace:
    """Where in a run folder a model was trained. ``global_step`` None: at the end of the stage."""

    folder: Path
    stage: str
    global_step: int | None = None


def checkpoint_place(path: Path) -> RunPlace | None:
    """The place of ``<run>/checkpoints/global_step_N``."""
    state = _json(path / "state.json")
    stage, step = state.get("stage"), state.get("global_step")
    if path.parent.name != "checkpoints" or not isinstance(stage, str) or not isinstance(step, int):
        return None
    return RunPlace(path.parent.parent, stage, step)


def model_place(path: Path) -> RunPlace | None:
    """The place of ``<run>/models/<stage>``."""
    run = path.parent.parent
    known = path.parent.name == "models" and (run / "resolved.yaml").is_file()
    return RunPlace(run, path.name) if known else None


def figures(place: RunPlace) -> dict[str, str]:
    """What the run's metrics say at that place, in words; empty where they say nothing."""
    lines = [line for line in _lines(place.folder / "metrics.jsonl") if line.get("stage") == place.stage]
    if place.global_step is not None:
        lines = [line for line in lines if line.get("global_step", 0) <= place.global_step]
    if not lines:
        return {}
    found = {"step": f"{lines[-1].get('step')} of stage {place.stage}"}
    for key, words in _FIGURES:
        value = next((line[key] for line in reversed(lines) if key in line), None)
        if isinstance(value, int | float):
            found[words] = f"{value:.4g}"
    return found


def settings(place: RunPlace) -> dict[str, str]:
    """How the stage was configured, as far as it matters to a reader."""
    try:
        loaded = YAML(typ="safe", pure=True).load((place.folder / "resolved.yaml").read_text("utf-8"))
    except (OSError, YAMLError):
        return {}
    stage = _at(loaded, f"stages.{place.stage}")
    found = {}
    for key, words in _SETTINGS:
        value = _at(stage, key)
        value = value.get("path") if isinstance(value, Mapping) else value
        if value is not None:
            found[words] = str(value)
    return found


def card(
    *, name: str, family: str, kind: str, parameters: int, dtype: str, origin: str, usage: str, task: str,
    place: RunPlace | None, library: str = "transformers", base: str | None = None,
) -> str:  # fmt: skip
    """The text of README.md. ``usage``: Python that loads the model from ``path/of/this/folder``."""
    head = [f"library_name: {library}", f"pipeline_tag: {task}"]
    head += [f"base_model: {json.dumps(base)}"] if base else []
    text = (
        "---\n" + "\n".join(head) + f"\n---\n\n# {name}\n\n"
        f"Written by posttune {__version__}: a {family} {kind} of {parameters:,} parameters "
        f"in {dtype}{origin}."
        f"\n\n```python\n{usage}\n```\n"
    )
    if place is not None:
        text += _table("Training", settings(place)) + _table("Figures", figures(place))
    return text


def _table(title: str, rows: Mapping[str, str]) -> str:
    if not rows:
        return ""
    lines = "".join(f"| {key} | {value.replace('|', '/')} |\n" for key, value in rows.items())
    return f"\n## {title}\n\n| | |\n|---|---|\n{lines}"


def _at(data: Any, path: str) -> Any:
    for key in path.split("."):
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found
