"""``posttune run``."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import click

from posttune.cli.config_cmd import OVERRIDES
from posttune.cli.output import emit_json, example, json_option, only_json, print_table
from posttune.errors import ConfigError

if TYPE_CHECKING:
    from posttune.config.load import LoadedConfig
    from posttune.run.dry_run import RunCheck


@click.command(
    "run",
    epilog=example(
        "posttune run configs/quickstart.yaml",
        "posttune run run.yaml rl.optimizer.lr=1e-5 output=runs/second --dry-run",
        "posttune run run.yaml --resume --nproc 2",
    ),
)
@click.argument("config")
@OVERRIDES
@click.option("--resume", is_flag=True, help="Go on with the run in the output folder, if there is one.")
@click.option("--dry-run", is_flag=True, help="Check all that can be known before a model loads.")
@click.option("--nproc", type=click.IntRange(min=1), help="Processes on this machine; 1 where none is given.")
@click.option("--plot/--no-plot", default=None, help="Draw the reward's curve; by default on a terminal.")
@json_option
def command(
    config: str,
    overrides: tuple[str, ...],
    resume: bool,
    dry_run: bool,
    nproc: int | None,
    plot: bool | None,
    as_json: bool,
) -> None:
    """Run the stages of CONFIG, in order. An override such as rl.steps=10 changes a value of the file."""
    from posttune.config.load import check_config

    if dry_run:
        click.get_current_context().exit(_dry_run(config, overrides, resume, nproc or 1, as_json))
    loaded = check_config(config, overrides)
    if nproc is not None and nproc > 1 and "WORLD_SIZE" not in os.environ:
        loaded.config.parallel.layout(nproc)
        arguments = _arguments(config, overrides, resume, plot, as_json)
        click.get_current_context().exit(_launch(arguments, nproc))
    _run(loaded, resume, plot, as_json)


def _run(loaded: LoadedConfig, resume: bool, plot: bool | None, as_json: bool) -> None:
    from posttune.cli.run_report import document, show
    from posttune.distributed.watch import recorded
    from posttune.run.runner import run

    began = time.perf_counter()
    with only_json(as_json), recorded():
        results = run(loaded, resume)
    if os.environ.get("RANK", "0") != "0":
        return
    seconds = time.perf_counter() - began
    if as_json:
        emit_json(document(loaded.config, results, seconds))
    else:
        show(loaded.config, results, seconds, plot)


def _launch(arguments: list[str], nproc: int) -> int:
    from posttune.run.launch import launch

    return launch(arguments, nproc)


def _arguments(
    config: str, overrides: tuple[str, ...], resume: bool, plot: bool | None, as_json: bool
) -> list[str]:
    flags = [
        ("--resume", resume),
        ("--plot", plot is True),
        ("--no-plot", plot is False),
        ("--json", as_json),
    ]
    return ["run", config, *overrides, *(flag for flag, wanted in flags if wanted)]


def _dry_run(config: str, overrides: tuple[str, ...], resume: bool, nproc: int, as_json: bool) -> int:
    with only_json(as_json):
        check = _check(config, overrides, resume, nproc)
    if as_json:
        emit_json({"ok": not check.problems, **_plain(check)})
        return 2 if check.problems else 0
    check.raise_problems()
    rows = [(name, facts.pop("kind", ""), _sentence(facts)) for name, facts in check.facts.items()]
    print_table(["stage", "kind", "known before it runs"], rows)
    for warning in check.warnings:
        click.echo(f"warning: {warning}")
    click.echo("ready to run; nothing was written")
    return 0


def _check(config: str, overrides: tuple[str, ...], resume: bool, nproc: int) -> RunCheck:
    from posttune.config.load import check_config
    from posttune.run.dry_run import RunCheck, dry_run

    try:
        return dry_run(check_config(config, overrides), resume, nproc)
    except ConfigError as error:
        return RunCheck(problems=error.problems)


def _plain(check: RunCheck) -> dict[str, Any]:
    return {"problems": check.problems, "warnings": check.warnings, "stages": check.facts}


def _sentence(facts: dict[str, Any]) -> str:
    """Facts in words; a list is shown without brackets."""
    words = {key: " ".join(value) if isinstance(value, list) else value for key, value in facts.items()}
    return ", ".join(f"{key}: {value}" for key, value in words.items())
