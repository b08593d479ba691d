"""What ``posttune score`` computes and shows."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from posttune.cli.output import number, print_table
from posttune.config.models import RewardRef

if TYPE_CHECKING:
    from posttune.reward.compare import Comparison
    from posttune.reward.configuration import RewardSetup
    from posttune.reward.run import OnError, RewardRun
    from posttune.types import Sample, Score

BARS = "▁▂▃▄▅▆▇█"
BINS = 10
WIDTH = 60  # characters of a response that a table shows
_SHAPE = (
    *("mean", "std", "min", "max", "scored", "unscorable", "timeouts", "errors"),
    *("seconds_p50", "seconds_p95", "seconds_max"),
)


@dataclass(frozen=True)
class Pair:
    """Two columns, and where they differ."""

    names: tuple[str, str]
    comparison: Comparison


@dataclass(frozen=True)
class Scored:
    """The rewards' scores, and by name of a configuration what its manager made of them."""

    run: RewardRun
    combined: Mapping[str, list[float | None]]

    def values(self, name: str) -> list[float | None]:
        """One number a sample: of a configuration, or of a reward."""
        from posttune.reward.scoring import scalars

        return self.combined[name] if name in self.combined else scalars(self.run.scores[name])

    def pair(self) -> Pair:
        """Two configurations, or else the first two rewards, compared. Raises click.UsageError."""
        from posttune.reward.compare import compare

        names = list(self.combined) if len(self.combined) > 1 else list(self.run.scores)
        if len(names) < 2:
            raise click.UsageError("--disagreements compares two: give a second --config or --reward")
        first, second = names[:2]
        return Pair((first, second), compare(self.values(first), self.values(second)))


def read_setups(configs: Sequence[str], refs: Sequence[RewardRef]) -> list[RewardSetup]:
    """The named configurations, their labels made distinct. Raises click.UsageError."""
    from posttune.reward.configuration import read_setup

    if not configs and not refs:
        raise click.UsageError("name a reward with --reward, or a configuration with --config")
    setups = [read_setup(each) for each in configs]
    names = [setup.name for setup in setups]
    if len(set(names)) < len(names):
        raise click.UsageError(f"two configurations are called {names[0]!r}: rename one of the files")
    return [setup.prefixed() for setup in setups] if len(setups) > 1 or refs else setups


def score_all(
    refs: Sequence[RewardRef],
    setups: Sequence[RewardSetup],
    samples: Sequence[Sample],
    on_error: OnError | None,
) -> Scored:
    """Score with every reward, and combine each configuration's with its manager."""
    from posttune.reward.run import run_rewards

    run = run_rewards([*refs, *(ref for setup in setups for ref in setup.refs)], samples, on_error)
    return Scored(run, {setup.name: _combined(setup, samples, run.scores) for setup in setups})


def _combined(
    setup: RewardSetup, samples: Sequence[Sample], scores: Mapping[str, list[Score]]
) -> list[float | None]:
    from posttune.facade import build_manager
    from posttune.reward.scoring import scalars

    if setup.manager is None:
        return scalars(scores[setup.refs[0].tag])
    mine = {ref.tag.removeprefix(f"{setup.name}/"): scores[ref.tag] for ref in setup.refs}
    return [reward.value for reward in build_manager(setup.manager).combine(samples, mine)]


def document(label: str, result: RewardRun) -> dict[str, Any]:
    """A reward's statistics as others read them; ``dimensions`` where its scores are dicts."""
    values: dict[str, Any] = {name: getattr(result.tallies[label], name) for name in _SHAPE}
    means = {name: _mean(column) for name, column in columns(label, result).items() if name != label}
    return values | ({"dimensions": means} if means else {})


def extras(
    samples: Sequence[Sample],
    scored: Scored,
    slowest: int,
    pair: Pair | None,
    most: int,
    with_histogram: bool,
) -> dict[str, Any]:
    """What was asked for beside the statistics, by its key in the document."""
    found: dict[str, Any] = {}
    if scored.combined:
        found["configurations"] = {name: _summary(values) for name, values in scored.combined.items()}
    if with_histogram:
        names = [*scored.combined, *scored.run.scores]
        found["histograms"] = {name: bins(_numbers(scored.values(name))) for name in names}
    if slowest:
        found["slowest"] = {
            label: [{"sample": each, "seconds": seconds} for each, seconds in _slow(scored, label, slowest)]
            for label in scored.run.scores
        }
    if pair is not None:
        found["disagreements"] = _disagreements(samples, pair, most)
    return found


def _disagreements(samples: Sequence[Sample], pair: Pair, most: int) -> dict[str, Any]:
    first, second = pair.names
    comparison = pair.comparison
    return {
        "between": [first, second],
        "compared": comparison.compared,
        "differing": comparison.differing,
        "first_higher": comparison.first_higher,
        "second_higher": comparison.second_higher,
        "scored_by_one": comparison.scored_by_one,
        "samples": [
            {
                "sample": samples[each.sample].id,
                "scores": [each.first, each.second],
                "prompt": samples[each.sample].prompt,
                "response": samples[each.sample].response,
            }
            for each in comparison.disagreements[:most]
        ],
    }


def columns(label: str, result: RewardRun) -> dict[str, list[float]]:
    """``label``, and ``label/dimension`` for each dimension: one number a sample, NaN where there is none."""
    from posttune.reward.scoring import dimensions, scalars

    scores = result.scores[label]
    parts = [dict(dimensions(label, score)) for score in scores]
    names = sorted({name for part in parts for name in part} - {label})
    found = {label: _numbers(scalars(scores))}
    return found | {name: [part.get(name, math.nan) for part in parts] for name in names}


def bins(values: Sequence[float], count: int = BINS) -> dict[str, list[float]]:
    """Counts between edges of equal distance, from the least value to the greatest."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return {"edges": [], "counts": []}
    low, high = min(known), max(known)
    if low == high:
        return {"edges": [low, high], "counts": [len(known)]}
    width = (high - low) / count
    counts = [0.0] * count
    for value in known:
        counts[min(count - 1, int((value - low) / width))] += 1
    return {"edges": [low + width * i for i in range(count)] + [high], "counts": counts}


def histogram(values: Sequence[float]) -> str:
    """How values spread from the least to the greatest, as a row of bars; empty where all are equal."""
    counts = bins(values)["counts"]
    if len(counts) < 2:
        return ""
    top = max(counts)
    return "".join(BARS[math.ceil(count / top * (len(BARS) - 1))] if count else " " for count in counts)


def show(
    samples: Sequence[Sample],
    scored: Scored,
    slowest: int,
    pair: Pair | None,
    most: int,
    with_histogram: bool,
) -> None:
    """Everything that was asked for, as tables."""
    _show_statistics(samples, scored.run)
    for name, values in scored.combined.items():
        summary = _summary(values)
        of = f"{summary['scored']} of {len(samples)} samples"
        click.echo(f"{name}: reward {number(summary['mean'])} over {of}")
    if with_histogram:
        for name in [*scored.combined, *scored.run.scores]:
            _show_histogram(name, scored.values(name))
    if slowest:
        rows = [
            (label, sample, 1000 * seconds)
            for label in scored.run.scores
            for sample, seconds in _slow(scored, label, slowest)
        ]
        print_table(("reward", "sample", "ms"), rows, title="slowest samples")
    if pair is not None:
        _show_disagreements(samples, pair, most)


def _show_statistics(samples: Sequence[Sample], result: RewardRun) -> None:
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


def _show_histogram(name: str, values: Sequence[float | None]) -> None:
    found = bins(_numbers(values))
    top = max(found["counts"], default=1.0)
    rows = [
        (f"{number(low)} to {number(high)}", int(count), "█" * math.ceil(30 * count / top))
        for low, high, count in zip(found["edges"], found["edges"][1:], found["counts"], strict=False)
    ]
    print_table((name, "samples", ""), rows)


def _show_disagreements(samples: Sequence[Sample], pair: Pair, most: int) -> None:
    comparison = pair.comparison
    title = (
        f"{comparison.differing} of {comparison.compared} samples differ: {pair.names[0]} higher in "
        f"{comparison.first_higher}, {pair.names[1]} in {comparison.second_higher}, "
        f"{comparison.scored_by_one} scored by one alone"
    )
    shown = [(samples[each.sample], each) for each in comparison.disagreements[:most]]
    rows = [
        (sample.id, _cell(each.first), _cell(each.second), _short(sample.response)) for sample, each in shown
    ]
    print_table(("sample", *pair.names, "response"), rows, title=title)


def _slow(scored: Scored, label: str, most: int) -> list[tuple[str, float]]:
    seconds = scored.run.tallies[label].seconds_by_sample
    return sorted(seconds.items(), key=lambda pair: -pair[1])[:most]


def _summary(values: Sequence[float | None]) -> dict[str, float | int | None]:
    known = _numbers([value for value in values if value is not None])
    return {"mean": _mean(known), "scored": len(known), "unscorable": len(values) - len(known)}


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _cell(value: float | None) -> str:
    return "unscorable" if value is None else number(value)


def _short(text: str) -> str:
    shown = " ".join(text.split())
    return shown if len(shown) <= WIDTH else f"{shown[: WIDTH - 1]}…"


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else None


def check_table_place(path: Path) -> None:
    """Raise click.BadParameter where no file could be written, before hours are spent on its contents."""
    if path.is_dir():
        raise click.BadParameter(
            f"{path} is a folder; name a file, {path / 'scores.parquet'}", param_hint="--output"
        )
    folder = next((each for each in path.absolute().parents if each.exists()), path.absolute().parent)
    if not folder.is_dir():
        raise click.BadParameter(f"{folder} is a file, not a folder", param_hint="--output")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise click.BadParameter(f"no file can be written in {folder}", param_hint="--output")


def write_table(path: Path, samples: Sequence[Sample], scored: Scored) -> None:
    """The samples, one column a reward (and a dimension) and a configuration; the rows are the input's."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from posttune.files import atomic_write_bytes

    found = {name: _numbers(values) for name, values in scored.combined.items()}
    for label in scored.run.scores:
        found |= columns(label, scored.run)
    table: dict[str, Any] = {
        "sample": [sample.id for sample in samples],
        "prompt": [sample.prompt for sample in samples],
        "response": [sample.response for sample in samples],
        **{name: pa.array(values, pa.float64(), from_pandas=False) for name, values in found.items()},
    }
    buffer = BytesIO()
    pq.write_table(pa.table(table), buffer, compression="zstd")
    atomic_write_bytes(path, buffer.getvalue())
