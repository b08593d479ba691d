"""A click group whose commands are imported when they are invoked, never to be listed.

Commands of plugins come from the entry-point group ``posttune.command``. They are loaded when
invoked, and cannot take a name of ours.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

import click

from posttune import metadata
from posttune.errors import PluginContractError
from posttune.kinds import COMMAND_GROUP
from posttune.nearest import nearest


@dataclass(frozen=True)
class LazyCommand:
    """Where a command is defined (``module:attribute``) and its line in the help of its group."""

    target: str
    help: str

    def load(self) -> click.Command:
        """Import the command."""
        module, attribute = self.target.split(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


class LazyGroup(click.Group):
    """Our own commands from a table, then those of plugins."""

    def __init__(self, *args: Any, table: Mapping[str, LazyCommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table = dict(table)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names, in the order of the table."""
        return [*self.table, *sorted(self._foreign())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import one command. None where nobody offers it."""
        if cmd_name in self.table:
            return self.table[cmd_name].load()
        return load_plugin_command(cmd_name) if cmd_name in self._foreign() else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name an unknown command's nearest neighbour."""
        name = args[0]
        if name not in self.table and name not in self._foreign() and not name.startswith("-"):
            near = nearest(name, self.list_commands(ctx))
            hint = f"; did you mean {near!r}?" if near else ""
            raise click.UsageError(f"no command {name!r}{hint}", ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in self.table.items()])
        foreign = self._foreign()
        if foreign:
            with formatter.section("Commands of plugins"):
                formatter.write_dl([(name, f"from {_offered_by(foreign[name])}") for name in sorted(foreign)])

    def _foreign(self) -> dict[str, list[EntryPoint]]:
        found: dict[str, list[EntryPoint]] = {}
        for point in metadata.entry_points(COMMAND_GROUP):
            if point.name not in self.table:
                found.setdefault(point.name, []).append(point)
        return found


def load_plugin_command(name: str) -> click.Command:
    """Load a plugin's command. Raises a PluginError where that is forbidden, ambiguous or fails."""
    from posttune.catalog import COMMAND, Catalog

    catalog = Catalog()
    command = catalog.load_object(COMMAND, name)
    if not isinstance(command, click.Command):
        what = f"its entry point names a {type(command).__name__}, not a click command"
        fix = "let the entry point name a click command"
        raise PluginContractError(what, plugin=catalog.check(COMMAND, name), fix=fix)
    return command


def _offered_by(points: list[EntryPoint]) -> str:
    return " and ".join(sorted(point.dist.name if point.dist else "?" for point in points))
