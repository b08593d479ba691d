"""``posttune score``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from posttune.cli.output import emit_json, example, json_option, number, only_json, print_table
from posttune.cli.reward_options import HELP, parse_rewards

if TYPE_CHECKING:
    from posttune.reward.run import RewardRun
    from posttune.types import Sample

BARS = "▁▂▃▄▅▆▇█"
BINS = 10
_SHAPE = (
    *("mean", "std", "min", "max", "scored", "unscorable", "timeouts", "errors"),
    *("seconds_p50", "seconds_p95", "seconds_max"),
)


@click.command(
    "score",
    epilog=example(
        "posttune score --reward gsm8k --input answers.jsonl --response-key output",
        'posttune score --reward \'function:{"path": "my_reward.py:score"}\' --input runs/quickstart',
    ),
)
@click.option("--reward", "rewards", multiple=True, required=True, help=HELP)
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
    default="raise",
    show_default=True,
    help="What an error in a reward does: end the command, or leave the sample out.",
)
@json_option
def command(
    rewards: tuple[str, ...],
    source: Path,
    prompt_key: str | None,
    response_key: str | None,
    reference_key: str | None,
    output: Path | None,
    on_error: Literal["raise", "mask"],
    as_json: bool,
) -> None:
    """Try rewards on saved answers, without a model.

    Shows each reward's statistics over all rows. A row that a reward cannot score is unscorable,
    not 0.
    """
    from posttune.reward.inputs import Keys, read_samples
    from posttune.reward.run import OnError, run_rewards

    refs = parse_rewards(rewards)
    with only_json(as_json):
        samples = read_samples(source, Keys(prompt_key, response_key, reference_key))
        result = run_rewards(refs, samples, OnError(on_error))
        if output is not None:
            _write(output, samples, result)
    if as_json:
        emit_json({"rewards": {label: document(label, result) for label in result.scores}})
    else:
        _show(samples, result)


def document(label: str, result: RewardRun) -> dict[str, Any]:
    """A reward's statistics as others read them; ``dimensions`` where its scores are dicts."""
    values: dict[str, Any] = {name: getattr(result.tallies[label], name) for name in _SHAPE}
    means = {name: _mean(column) for name, column in columns(label, result).items() if name != label}
    return values | ({"dimensions": means} if means else {})


def columns(label: str, result: RewardRun) -> dict[str, list[float]]:
    """``label``, and ``label/dimension`` for each dimension: one number a sample, NaN where there is none."""
    from posttune.reward.scoring import dimensions, scalar

    scores = result.scores[label]
    parts = [dict(dimensions(label, score)) for score in scores]
    names = sorted({name for part in parts for name in part} - {label})
    totals = [scalar(score) for score in scores]
    found = {label: [math.nan if value is None else value for value in totals]}
    return found | {name: [part.get(name, math.nan) for part in parts] for name in names}


def histogram(values: Sequence[float], bins: int = BINS) -> str:
    """How values spread from the least to the greatest, as a row of bars; empty where all are equal."""
    known = [value for value in values if not math.isnan(value)]
    if not known or min(known) == max(known):
        return ""
    low, width = min(known), (max(known) - min(known)) / bins
    counts = [0] * bins
    for value in known:
        counts[min(bins - 1, int((value - low) / width))] += 1
    top = max(counts)
    return "".join(BARS[math.ceil(count / top * (len(BARS) - 1))] if count else " " for count in counts)


def _show(samples: Sequence[Sample], result: RewardRun) -> None:
    """A column a reward, a row a statistic."""
    tallies = result.tallies
    parts = {label: columns(label, result) for label in tallies}
    rows: list[tuple[object, ...]] = [
        (name, *(getattr(tally, name) for tally in tallies.values())) for name in _SHAPE[:8]
    ]
    for name in _SHAPE[8:]:
        shown = name.replace("seconds_", "ms a sample, ")
        rows.append((shown, *(1000 * getattr(tally, name) for tally in tallies.values())))
    rows.append(("slowest sample", *(tally.slowest for tally in tallies.values())))
    rows.append(("spread, min to max", *(histogram(parts[label][label]) for label in tallies)))
    print_table(("", *tallies), rows, title=f"{len(samples)} samples")
    for label, found in parts.items():
        for name, values in found.items():
            if name != label:
                click.echo(f"{name}: {number(_mean(values))}")


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else None


def _write(path: Path, samples: Sequence[Sample], result: RewardRun) -> None:
    """The samples and one column a reward (and a dimension); the rows are those of the input, in order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from posttune.files import atomic_write_bytes

    table: dict[str, Any] = {
        "sample": [sample.id for sample in samples],
        "prompt": [sample.prompt for sample in samples],
        "response": [sample.response for sample in samples],
    }
    for label in result.scores:
        table |= {
            name: pa.array(values, pa.float64(), from_pandas=False)
            for name, values in columns(label, result).items()
        }
    buffer = BytesIO()
    pq.write_table(pa.table(table), buffer, compression="zstd")
    atomic_write_bytes(path, buffer.getvalue())
