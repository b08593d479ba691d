"""``posttune version``: read from metadata, so that nothing heavy is imported."""

from __future__ import annotations

import importlib.metadata
import platform

import click

from posttune._version import API, __version__
from posttune.cli.output import emit_json, example, json_option


@click.command("version", epilog=example("posttune version --json"))
@json_option
def command(as_json: bool) -> None:
    """Show the versions of posttune, Python and the libraries it stands on."""
    versions = {
        "posttune": __version__,
        "api": API,
        "python": platform.python_version(),
        **{name: installed_version(name) for name in ("torch", "transformers", "peft")},
        "platform": platform.platform(),
    }
    if as_json:
        emit_json(versions)
        return
    for name, version in versions.items():
        click.echo(f"{name} {version or 'not installed'}")


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
