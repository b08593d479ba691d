"""``posttune selftest``: check the algorithms of this installation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from posttune.cli.output import emit_json, example, json_option, print_table

if TYPE_CHECKING:
    from posttune.selftest.gold import GoldReport, Nested


@click.group(epilog=example("posttune selftest gold algorithms.json"))
def command() -> None:
    """Check the algorithms of this installation."""


@command.command(
    epilog=example("posttune selftest gold algorithms.json", "posttune selftest gold mine.json --json")
)
@click.argument("file", type=click.Path(path_type=Path))
@json_option
@click.pass_context
def gold(ctx: click.Context, file: Path, as_json: bool) -> None:
    """Run every case of a gold FILE through our estimators, losses, KL terms and aggregations.

    FILE is JSON: {"cases": [{"name", "source", "inputs", "outputs", "tol"}]}. Exits 1 when a case
    fails, 2 when the file cannot be used. A case of an unknown family is listed, not failed.
    """
    from posttune.selftest.gold import run_gold

    report = run_gold(file)
    if as_json:
        emit_json(report)
    else:
        _show(report)
    ctx.exit(1 if report.failed else 0)


def _show(report: GoldReport) -> None:
    if report.failed:
        rows = [(each.name, each.output, _short(each.expected), _short(each.got)) for each in report.failed]
        print_table(("case", "output", "expected", "got"), rows)
    for name in report.unsupported:
        click.echo(f"unsupported: {name}", err=True)
    failed = len({each.name for each in report.failed})
    click.echo(f"{report.passed} passed, {failed} failed, {len(report.unsupported)} unsupported")


def _short(value: Nested, width: int = 60) -> str:
    text = str(value)
    return text if len(text) <= width else text[: width - 1] + "…"
