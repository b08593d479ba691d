"""``posttune config``: check, show, schema."""

from __future__ import annotations

from pathlib import Path

import click

from posttune.cli.output import emit_json, example, json_option
from posttune.errors import ConfigError, UserError

OVERRIDES = click.argument("overrides", nargs=-1, metavar="[a.b=value ...]")


@click.group("config", epilog=example("posttune config check run.yaml rl.optimizer.lr=1e-4"))
def command() -> None:
    """Check, show or describe configurations."""


@command.command(
    "check", epilog=example("posttune config check run.yaml", "posttune config check run.yaml --json")
)
@click.argument("config")
@OVERRIDES
@json_option
def check(config: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check CONFIG against the schema and every named plugin's options. No data or model is read."""
    from posttune.config.load import check_config

    problems = []
    try:
        loaded = check_config(config, overrides)
    except ConfigError as error:
        if not as_json:
            raise
        problems = error.problems
    if as_json:
        emit_json({"ok": not problems, "problems": problems})
    else:
        click.echo(f"{config}: valid; stages: {', '.join(loaded.config.stages)}")
    click.get_current_context().exit(2 if problems else 0)


@command.command("show", epilog=example("posttune config show run.yaml rl.steps=10"))
@click.argument("config")
@OVERRIDES
@json_option
def show(config: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print CONFIG with every default filled in."""
    from posttune.config.load import check_config

    loaded = check_config(config, overrides)
    if as_json:
        emit_json(loaded.plain())
    else:
        click.echo(loaded.to_yaml(), nl=False)


@command.command("schema", epilog=example("posttune config schema --output posttune.schema.json"))
@click.option("--output", metavar="FILE", help="Write the schema there instead of to stdout.")
@json_option
def schema(output: str | None, as_json: bool) -> None:
    """Write the JSON Schema of a configuration, with the options of every installed plugin."""
    import json

    from posttune.config.schema import json_schema
    from posttune.files import atomic_write_text

    joined = json_schema()
    for plugin, reason in joined.left_out.items():
        click.echo(f"posttune: warning: no options of {plugin} in the schema: {reason}", err=True)
    if output is None:
        emit_json(joined.document)
        return
    if Path(output).is_dir():
        raise UserError("is a folder", who=output, fix="name the file to write")
    atomic_write_text(output, json.dumps(joined.document, indent=2, ensure_ascii=False) + "\n")
    if as_json:
        emit_json({"output": output, "left_out": joined.left_out})
    else:
        click.echo(f"wrote {output}; let a YAML file begin with: # yaml-language-server: $schema={output}")
