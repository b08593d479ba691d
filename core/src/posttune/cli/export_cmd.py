"""``posttune export``."""

from __future__ import annotations

import json
from pathlib import Path

import click
from pydantic import ValidationError

from posttune.cli.output import emit_json, example, json_option, only_json
from posttune.config.models import PluginRef


@click.command(
    "export",
    epilog=example(
        "posttune export runs/quickstart --to exported",
        "posttune export runs/quickstart/checkpoints/global_step_40 --to exported --dtype bfloat16",
        "posttune export runs/lora --to adapter --exporter lora_adapter",
        "posttune export runs/ppo --to critic --part critic",
        "posttune export verl/global_step_100/actor --to exported --exporter 'hf:{\"shard_gb\": 2}'",
    ),
)
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--to", "to", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option(
    "--base", type=click.Path(path_type=Path), help="Model of adapters, where it has moved; config of shards."
)
@click.option("--part", help="A model beside the main one, such as critic.")
@click.option("--exporter", default="hf", show_default=True, help="Exporter: NAME, or NAME:{JSON options}.")
@click.option("--dtype", default="keep", show_default=True, help="keep, float32, bfloat16 or float16.")
@json_option
def command(
    source: Path, to: Path, base: Path | None, part: str | None, exporter: str, dtype: str, as_json: bool
) -> None:
    """Write SOURCE for others to load.

    SOURCE is a run, a checkpoint, a Hugging Face folder, a PEFT folder or verl's shards. What was
    written is loaded again and must give the same logits, or nothing is left.
    """
    from posttune.checkpoint.precheck import check_export

    ref = _exporter(exporter)
    check_export(source, to, dtype=dtype, exporter=ref, base=base)
    from posttune.checkpoint._export import export_model
    from posttune.checkpoint.sources import open_source

    with only_json(as_json):
        opened = open_source(source, base=base, part=part)
        exported = export_model(opened, to, dtype=dtype, exporter=ref)
    if as_json:
        emit_json(exported.as_json())
        return
    click.echo(
        f"{to}: {exported.report.parameters:,} parameters in {exported.report.dtype}, "
        f"read back; logits differ by at most {exported.verification.max_abs_logit_difference:.2g}"
    )


def _exporter(text: str) -> PluginRef:
    """A reference from ``NAME`` or ``NAME:{JSON options}``. Raises click.BadParameter."""
    name, _, options = text.partition(":")
    try:
        return PluginRef(name=name, options=json.loads(options) if options else {})
    except (ValueError, ValidationError):
        what = f'what follows the colon in {text!r} is no JSON object; write it as in hf:{{"shard_gb": 2}}'
        raise click.BadParameter(what, param_hint="--exporter") from None
