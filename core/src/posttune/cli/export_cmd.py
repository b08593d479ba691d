"""``posttune export``."""

from __future__ import annotations

from pathlib import Path

import click

from posttune.cli.output import emit_json, example, json_option, only_json


@click.command(
    "export",
    epilog=example(
        "posttune export runs/quickstart --to exported",
        "posttune export runs/quickstart/checkpoints/global_step_40 --to exported --dtype bfloat16",
    ),
)
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--to", "to", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--base", type=click.Path(path_type=Path), help="Model of the adapters, where it has moved.")
@click.option("--exporter", default="hf", show_default=True, help="Name of the exporter.")
@click.option("--dtype", default="keep", show_default=True, help="keep, float32, bfloat16 or float16.")
@json_option
def command(source: Path, to: Path, base: Path | None, exporter: str, dtype: str, as_json: bool) -> None:
    """Write SOURCE (a run, a checkpoint or a Hugging Face folder) for others to load.

    What was written is loaded again and must give the same logits, or nothing is left.
    """
    from posttune.checkpoint._export import export_model
    from posttune.checkpoint.sources import open_source
    from posttune.config.models import PluginRef

    with only_json(as_json):
        opened = open_source(source, base=base)
        exported = export_model(opened, to, dtype=dtype, exporter=PluginRef(name=exporter))
    if as_json:
        emit_json(exported.as_json())
        return
    click.echo(
        f"{to}: {exported.report.parameters:,} parameters in {exported.report.dtype}, "
        f"read back; logits differ by at most {exported.verification.max_abs_logit_difference:.2g}"
    )
