"""``posttune evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from posttune.cli.output import emit_json, example, json_option, number, only_json, print_table, progress
from posttune.cli.reward_options import HELP, executed, execution_options, parse_rewards

if TYPE_CHECKING:
    from posttune.config.models import DType
    from posttune.evaluate.report import Evaluation


@click.command(
    "evaluate",
    epilog=example(
        "posttune evaluate runs/quickstart --data runs/quickstart/data/test --reward gsm8k",
        "posttune evaluate exported --data data/gsm8k --reward gsm8k --n 8 --temperature 0.7 --limit 200",
    ),
)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--data", required=True, type=click.Path(path_type=Path), help="Dataset folder.")
@click.option("--reward", "rewards", multiple=True, required=True, help=f"{HELP} The first decides accuracy.")
@click.option("--backend", default="hf", show_default=True, help="Rollout backend.")
@click.option("--n", default=1, show_default=True, type=click.IntRange(1), help="Answers to each prompt.")
@click.option(
    "--max-new-tokens", default=256, show_default=True, type=click.IntRange(1), help="Longest answer."
)
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0), help="0 is greedy.")
@click.option("--limit", type=click.IntRange(1), help="Use the first rows only.")
@click.option("--by", multiple=True, metavar="COLUMN", help="Break the accuracy down by a column.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of the sampling.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Type of the weights while it answers.",
)
@execution_options
@click.option("--output", type=click.Path(path_type=Path), help="Folder for the result and all answers.")
@json_option
def command(
    model: Path,
    data: Path,
    rewards: tuple[str, ...],
    backend: str,
    n: int,
    max_new_tokens: int,
    temperature: float,
    limit: int | None,
    by: tuple[str, ...],
    seed: int,
    device: str,
    dtype: DType,
    executor: Literal["inline", "thread", "process"] | None,
    workers: int | None,
    timeout: float | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Answer the prompts of a dataset with MODEL and report accuracy with its 95 % interval.

    MODEL is a Hugging Face folder, a checkpoint, or a run folder (its last checkpoint).
    """
    from posttune.config.models import DataConfig, ModelConfig, RolloutConfig, SamplingConfig
    from posttune.distributed.ranks import Ranks
    from posttune.evaluate.stage import Job, check_output, run_job, write_evaluation

    if output is not None:
        check_output(output)
    sampling = SamplingConfig(n=n, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    job = Job(
        model=ModelConfig(path=str(model), dtype=dtype),
        model_path=model,
        data=DataConfig(path=str(data), limit=limit),
        data_path=data,
        rewards=executed(parse_rewards(rewards), executor, workers, timeout),
        rollout=RolloutConfig(name=backend, sampling=sampling),
        by=by,
        seed=seed,
        device=str(Ranks.current(device).device),
    )
    with only_json(as_json), progress("prompts") as bar:
        result = run_job(job, lambda done, total: bar.update(bar.task_ids[0], completed=done, total=total))
    if output is not None:
        write_evaluation(result, output)
    if as_json:
        emit_json(result.as_json())
    else:
        _show(result)


def _show(result: Evaluation) -> None:
    rows: list[tuple[object, ...]] = [("all", *_cells(result.accuracy, result.ci95, result.n))]
    for column, parts in result.by.items():
        rows += [
            (f"{column} = {value}", *_cells(part.accuracy, part.ci95, part.n))
            for value, part in parts.items()
        ]
    print_table(("prompts", "accuracy", "95 % interval", "n"), rows)
    if result.k > 1:
        draws = ", ".join(f"pass@{k} {number(value)}" for k, value in result.pass_at_k.items())
        click.echo(f"mean@{result.k} {number(result.mean_at_k)}, {draws}")
    for label, value in result.rewards.items():
        click.echo(f"reward {label}: {number(value)}")
    click.echo(
        f"{result.tokens_per_completion:.1f} tokens an answer, "
        f"{100 * result.truncated_fraction:.1f} % cut short, "
        f"{result.unscorable} unscorable, {result.tokens_per_s:,.0f} tokens/s"
    )


def _cells(
    accuracy: float | None, interval: tuple[float, float] | None, n: int
) -> tuple[object, object, object]:
    shown = "" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"
    return ("" if accuracy is None else f"{accuracy:.3f}", shown, n)
