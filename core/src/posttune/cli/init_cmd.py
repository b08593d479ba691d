"""``posttune init``: a configuration to begin with."""

from __future__ import annotations

from pathlib import Path

import click

from posttune.cli.output import emit_json, example, json_option, only_json


@click.command("init", epilog=example("posttune init toy", "posttune init dapo --in my_run"))
@click.argument("recipe", default="grpo")
@click.option(
    "--in",
    "folder",
    type=click.Path(path_type=Path),
    default=Path(),
    help="The folder to write into; by default this one.",
)
@click.option("--list", "show", is_flag=True, help="List the recipes; write nothing.")
@json_option
def command(recipe: str, folder: Path, show: bool, as_json: bool) -> None:
    """Write a commented configuration for RECIPE (by default grpo), and the schema that editors read.

    `toy` runs as it is; the others name data and a model to put in. No file is replaced but the schema.
    """
    import json

    from posttune.template.recipes import RECIPES, files, write

    if show:
        _list(RECIPES, as_json)
        return
    files(recipe)
    with only_json(as_json):
        from posttune.config.schema import json_schema

        joined = json_schema()
        for plugin, reason in joined.left_out.items():
            click.echo(f"posttune: warning: no options of {plugin} in the schema: {reason}", err=True)
        schema = json.dumps(joined.document, indent=2, ensure_ascii=False) + "\n"
        written = write(recipe, folder, schema)
    if as_json:
        emit_json({"recipe": recipe, "files": written})
        return
    click.echo(f"wrote {', '.join(map(str, written))}")
    change = "" if folder == Path() else f"cd {folder} && "
    click.echo(f"next: {change}posttune run run.yaml{'' if recipe == 'toy' else ' --dry-run'}")


def _list(recipes: dict[str, str], as_json: bool) -> None:
    if as_json:
        emit_json([{"recipe": name, "is": heading} for name, heading in recipes.items()])
        return
    width = max(map(len, recipes))
    for name, heading in recipes.items():
        click.echo(f"{name:<{width}}  {heading}")
