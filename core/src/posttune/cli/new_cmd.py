"""``posttune new``: a project for a plugin of one's own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import click

from posttune.catalog import Catalog
from posttune.cli.output import emit_json, example, json_option, only_json
from posttune.errors import UserError
from posttune.kinds import KINDS
from posttune.nearest import nearest


@click.command(
    "new",
    epilog=example(
        "posttune new reward politeness",
        'posttune new policy_loss bounded --author "Ada L." --description "A bounded loss." --in ~/src',
    ),
)
@click.argument("kind")
@click.argument("name")
@click.option("--author", help="Author of the package; by default git's user.name.")
@click.option("--description", help="One sentence about it.")
@click.option(
    "--in",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Where the project's folder is made; by default here.",
)
@json_option
def command(
    kind: str, name: str, author: str | None, description: str | None, folder: Path, as_json: bool
) -> None:
    """Make a package with a plugin of KIND called NAME: code, tests, an example, CI and a licence.

    It installs, is listed, and passes its own tests as it is. KIND is one of the kinds that
    `posttune plugins list` shows.
    """
    if kind not in KINDS:
        near = nearest(kind, KINDS)
        meant = f" (did you mean {near!r}?)" if near else ""
        raise UserError(f"no kind of plugin is called {kind!r}{meant}", fix=f"one of {', '.join(KINDS)}")
    _check_free(kind, name)
    with only_json(as_json):
        from posttune.template.bake import bake

        made = bake(kind, name, author=author or _git_user(), description=description, folder=folder)
    if as_json:
        emit_json({"project": made, "files": _files(made)})
        return
    click.echo(f"{made}: {len(_files(made))} files")
    click.echo(f"next: cd {made} && pip install -e '.[test]' && pytest")


def _check_free(kind: str, name: str) -> None:
    """Refuse a name that is taken here: of two plugins with one name neither can be used."""
    for entry in Catalog().entries(kind):
        if entry.name == name:
            what = f"{kind} {name!r} is the name of a plugin of {entry.distribution} already"
            raise UserError(what, who="posttune new", fix="choose another name, or uninstall that one")


def _files(made: Path) -> list[str]:
    return sorted(path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file())


def _git_user() -> str:
    try:
        done = subprocess.run(
            ["git", "config", "user.name"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
