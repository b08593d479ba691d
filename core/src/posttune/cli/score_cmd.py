"""``posttune score``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from posttune.cli.output import emit_json, example, json_option, only_json
from posttune.cli.reward_options import HELP, executed, execution_options, parse_rewards
from posttune.cli.score_report import (
    check_table_place,
    document,
    extras,
    read_setups,
    score_all,
    show,
    write_table,
)


@click.command(
    "score",
    epilog=example(
        "posttune score --reward gsm8k --input answers.jsonl --response-key output",
        'posttune score --reward \'function:{"path": "my_reward.py:score"}\' --input runs/quickstart',
        "posttune score --config a.yaml --config b.yaml --input runs/quickstart --disagreements 10",
    ),
)
@click.option("--reward", "rewards", multiple=True, help=HELP)
@click.option(
    "--config",
    "configs",
    multiple=True,
    metavar="FILE[:STAGE]",
    help="The rewards and the manager of a run's configuration; give two to compare them.",
)
@click.option(
    "--input",
    "source",
    required=True,
    type=click.Path(path_type=Path),
    help="JSON lines, JSON, Parquet or Arrow; or a run folder, for its rollouts.",
)
@click.option("--prompt-key", help="Column (or dotted path) of the prompt.")
@click.option("--response-key", help="Column of the response; by default response, completion or answer.")
@click.option("--reference-key", help="Column of the reference.")
@click.option("--output", type=click.Path(path_type=Path), help="Parquet file to write, one column a reward.")
@click.option(
    "--on-error",
    type=click.Choice(["raise", "mask"]),
    help="What an error in a reward does: end the command, or leave the sample out. By default what the "
    "reward's configuration says, else raise.",
)
@execution_options
@click.option("--slowest", type=click.IntRange(0), default=0, help="Show so many of the slowest samples.")
@click.option(
    "--disagreements",
    type=click.IntRange(0),
    default=0,
    help="Show so many of the samples on which two configurations, else the first two rewards, differ.",
)
@click.option("--histogram", "with_histogram", is_flag=True, help="Show how the scores spread.")
@json_option
def command(
    rewards: tuple[str, ...],
    configs: tuple[str, ...],
    source: Path,
    prompt_key: str | None,
    response_key: str | None,
    reference_key: str | None,
    output: Path | None,
    on_error: Literal["raise", "mask"] | None,
    executor: Literal["inline", "thread", "process"] | None,
    workers: int | None,
    timeout: float | None,
    slowest: int,
    disagreements: int,
    with_histogram: bool,
    as_json: bool,
) -> None:
    """Try rewards on saved answers, without a model.

    Shows each reward's statistics over all rows, and of a configuration also what its manager makes of
    them, in the column that bears the configuration's name. A row that a reward cannot score is
    unscorable, not 0.
    """
    from posttune.reward.inputs import Keys, read_samples
    from posttune.reward.run import OnError

    refs = executed(parse_rewards(rewards), executor, workers, timeout)
    if output is not None:
        check_table_place(output)
    with only_json(as_json):
        setups = read_setups(configs, refs)
        samples = read_samples(source, Keys(prompt_key, response_key, reference_key))
        scored = score_all(refs, setups, samples, None if on_error is None else OnError(on_error))
        pair = scored.pair() if disagreements else None
        if output is not None:
            write_table(output, samples, scored)
    if as_json:
        emit_json(
            {"rewards": {label: document(label, scored.run) for label in scored.run.scores}}
            | extras(samples, scored, slowest, pair, disagreements, with_histogram)
        )
    else:
        show(samples, scored, slowest, pair, disagreements, with_histogram)
