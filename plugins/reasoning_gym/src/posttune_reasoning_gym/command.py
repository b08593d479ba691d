"""``posttune reasoning-gym``: procedural tasks as a JSON lines file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
from posttune.errors import UserError

from posttune_reasoning_gym import DENIED

EPILOG = """\b
Example:
  posttune reasoning-gym basic_arithmetic leg_counting --size 500 --to tasks.jsonl
  posttune data convert tasks.jsonl --to data/tasks
"""


@click.command("reasoning-gym", epilog=EPILOG)
@click.argument("tasks", nargs=-1, metavar="TASK...")
@click.option("--to", type=click.Path(path_type=Path), help="JSON lines file to write.")
@click.option("--size", default=100, show_default=True, type=click.IntRange(1), help="Problems of each task.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Makes them others.")
@click.option("--config", default="{}", help="The tasks' own options, a JSON object.")
@click.option("--plain", is_flag=True, help="Do not ask for <answer> tags in the prompt.")
@click.option("--list", "show", is_flag=True, help="Show the tasks, and which the reward denies.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; messages go to stderr.")
def command(
    tasks: tuple[str, ...],
    to: Path | None,
    size: int,
    seed: int,
    config: str,
    plain: bool,
    show: bool,
    as_json: bool,
) -> None:
    """Write problems of reasoning-gym's TASKS as training data for the reward reasoning_gym."""
    from posttune_reasoning_gym import _tasks

    if show:
        _list(_tasks.names(), as_json)
        return
    if not tasks or to is None:
        raise click.UsageError("name a task and the file to write, --to FILE; or use --list")
    suffix = "" if plain else _tasks.SUFFIX
    lines = [
        json.dumps(row) for task in tasks for row in _tasks.rows(task, size, seed, _options(config), suffix)
    ]
    _write(to, "".join(f"{line}\n" for line in lines))
    for task in sorted(set(tasks) & set(DENIED)):
        click.echo(f"note: the reward denies {task!r} unless options.allow names it", err=True)
    document = {"file": str(to), "rows": len(lines), "tasks": list(tasks)}
    click.echo(json.dumps(document) if as_json else f"{len(lines)} problems in {to}")


def _list(names: list[str], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([{"task": name, "denied": name in DENIED} for name in names]))
        return
    for name in names:
        click.echo(f"{name}{'  (denied)' if name in DENIED else ''}")


def _options(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise click.BadParameter("is no JSON object", param_hint="--config")
    return found


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    if path.is_dir():
        raise UserError("is a folder", who=str(path), fix="name a file, such as tasks.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
