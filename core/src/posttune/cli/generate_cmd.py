"""``posttune generate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from posttune.cli.output import emit_json, example, json_option, only_json

if TYPE_CHECKING:
    from posttune.config.models import DType
    from posttune.models.generate import Answer


@click.command(
    "generate",
    epilog=example(
        'posttune generate exported --prompt "12+34="',
        'posttune generate runs/gsm8k --prompt "What is 2 + 3?" --n 4 --temperature 0.7 --json',
    ),
)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--prompt", "prompts", multiple=True, required=True, help="A prompt; may be repeated.")
@click.option(
    "--max-new-tokens", default=128, show_default=True, type=click.IntRange(1), help="Longest answer."
)
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0), help="0 is greedy.")
@click.option("--n", default=1, show_default=True, type=click.IntRange(1), help="Answers to each prompt.")
@click.option(
    "--template", default="auto", show_default=True, help="Chat template: auto, none or a Jinja file."
)
@click.option("--backend", default="hf", show_default=True, help="Rollout backend.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of the sampling.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Type of the weights while it answers.",
)
@json_option
def command(
    model: Path,
    prompts: tuple[str, ...],
    max_new_tokens: int,
    temperature: float,
    n: int,
    template: str,
    backend: str,
    seed: int,
    device: str,
    dtype: DType,
    as_json: bool,
) -> None:
    """Answer prompts with MODEL: a Hugging Face folder, a checkpoint, or a run (its last checkpoint)."""
    from posttune.config.models import ModelConfig, SamplingConfig
    from posttune.distributed.ranks import Ranks
    from posttune.models.generate import answer

    with only_json(as_json):
        answers = answer(
            ModelConfig(path=str(model), dtype=dtype),
            model,
            prompts,
            SamplingConfig(n=n, temperature=temperature, max_new_tokens=max_new_tokens),
            template=template,
            backend=backend,
            seed=seed,
            device=str(Ranks.current(device).device),
        )
    if as_json:
        emit_json(answers)
    else:
        _show(answers, headed=len(prompts) > 1 or n > 1)


def _show(answers: list[Answer], *, headed: bool) -> None:
    """The bare text of a single answer, so that it can be piped; several under their prompts."""
    for each in answers:
        if headed:
            click.secho(f"[{each.index + 1}] {each.prompt}", bold=True)
        click.echo(each.text)
        if each.finish_reason == "length":
            click.echo("posttune: warning: the answer was cut short (--max-new-tokens)", err=True)
