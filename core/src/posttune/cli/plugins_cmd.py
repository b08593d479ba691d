"""``posttune plugins``: what is installed, and what one plugin takes and does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from posttune.catalog import Catalog, Entry
from posttune.cli.output import emit_json, example, json_option, only_json, print_table
from posttune.errors import PluginError
from posttune.kinds import KINDS, Kind


@click.group("plugins", epilog=example("posttune plugins list", "posttune plugins show reward gsm8k"))
def command() -> None:
    """List the installed plugins, and show one."""


@command.command(
    "list",
    epilog=example(
        "posttune plugins list --kind reward",
        "posttune plugins list --load --json",
        "POSTTUNE_BLOCK=gsm8k posttune plugins list",
    ),
)
@click.option("--kind", help=f"One kind only: {', '.join(KINDS)}.")
@click.option("--load", is_flag=True, help="Import every plugin that is ready, and name the broken ones.")
@json_option
def list_plugins(kind: str | None, load: bool, as_json: bool) -> None:
    """List the installed plugins with their status; without --load nothing is imported."""
    catalog = Catalog()
    with only_json(as_json):
        entries = catalog.entries(kind)
        if load:
            entries = [_loaded(entry, catalog) for entry in entries]
    if as_json:
        emit_json(entries)
        return
    for each in KINDS.values():
        _print_kind(each, [entry for entry in entries if entry.kind == each.name])


@command.command("show", epilog=example("posttune plugins show policy_loss ppo_clip"))
@click.argument("kind")
@click.argument("name")
@json_option
def show(kind: str, name: str, as_json: bool) -> None:
    """Show one plugin: where it comes from, its options and its hooks. Imports its module."""
    from posttune.describe import describe

    with only_json(as_json):
        description = describe(kind, name)
    if as_json:
        emit_json(description)
        return
    _print(description)


def _loaded(entry: Entry, catalog: Catalog) -> Entry:
    """The entry after an attempt to import it: ``broken`` where that fails."""
    from posttune.pipeline import load_plugin

    if entry.status != "ready":
        return entry
    try:
        load_plugin(entry.kind, entry.name, catalog)
    except PluginError as error:
        return replace(entry, status="broken", reason=error.what)
    return entry


def _print_kind(kind: Kind, entries: list[Entry]) -> None:
    rows = [
        [entry.name, f"{entry.distribution} {entry.version}", entry.api, entry.status] for entry in entries
    ]
    if rows:
        print_table(("name", "from", "api", "status"), rows, title=f"{kind.name}: {kind.summary}")
    for entry in entries:
        if entry.reason:
            click.echo(f"  {entry.name}: {entry.reason}")


def _print(description: dict[str, Any]) -> None:
    click.echo(f"{description['kind']} {description['name']}: {description['summary']}")
    click.echo(f"from {description['distribution']} {description['version']}, {description['class']}")
    click.echo(description["file"])
    if description["options"]:
        rows = [_option_row(option) for option in description["options"]]
        print_table(("option", "type", "default", "description"), rows, title="Options")
    else:
        click.echo("It takes no options.")
    hooks = [[hook["name"] + hook["signature"], hook["summary"]] for hook in description["hooks"]]
    print_table(("hook", "what it does"), hooks, title="Hooks")


def _option_row(option: dict[str, Any]) -> list[str]:
    default = "required" if option["required"] else repr(option["default"])
    return [option["name"], option["type"], default, option["description"]]
