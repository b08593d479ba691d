"""``posttune doctor``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from posttune.cli.output import emit_json, example, json_option, only_json

if TYPE_CHECKING:
    from posttune.doctor.diagnose import Diagnosis

_MARKS = {"info": "  ", "warning": "! ", "error": "X "}


@click.command(
    "doctor",
    epilog=example(
        "posttune doctor",
        "posttune doctor vllm --import",
        'posttune doctor --plan "posttune-vllm[engine]" "posttune-sglang[engine]"',
    ),
)
@click.argument("names", nargs=-1, metavar="[PLUGIN...]")
@click.option(
    "--import", "imports", is_flag=True, help="Import plugins and engines, in processes of their own."
)
@click.option(
    "--plan", is_flag=True, help="Take the arguments as requirements: can they share one environment?"
)
@click.option(
    "--deadline",
    type=click.FloatRange(0, min_open=True),
    default=180.0,
    show_default=True,
    help="Seconds for one import, or for the resolver.",
)
@json_option
def command(names: tuple[str, ...], imports: bool, plan: bool, deadline: float, as_json: bool) -> None:
    """Examine this machine and the installed plugins: what is wrong, why, and the command that mends it.

    A PLUGIN is the name of a plugin or of its distribution; without one all are examined, and an
    engine that is not installed is a warning only. Exits 1 if anything is an error.
    """
    from posttune.doctor import diagnose as doctor

    if plan and (imports or not names):
        raise click.UsageError("--plan takes requirements, and no --import")
    with only_json(as_json):
        if plan:
            found = doctor.plan(names, deadline=deadline)
        else:
            found = doctor.diagnose(names, imports=imports, deadline=deadline)
    if as_json:
        emit_json({"ok": found.ok, "findings": found.findings})
    else:
        _show(found)
    click.get_current_context().exit(0 if found.ok else 1)


def _show(found: Diagnosis) -> None:
    for finding in found.findings:
        click.echo(f"{_MARKS[finding.severity]}{finding.subject}: {finding.cause}")
        if finding.severity != "info":
            click.echo(f"    {finding.code}; next: {finding.fix}")
    counts = {grade: sum(each.severity == grade for each in found.findings) for grade in _MARKS}
    if len(found.findings) > 1:
        click.echo(f"{counts['error']} errors, {counts['warning']} warnings")
