"""``posttune data convert`` and ``posttune data inspect``."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from posttune.cli.output import emit_json, example, json_option, only_json, print_table
from posttune.config.models import PluginRef
from posttune.errors import UserError

if TYPE_CHECKING:
    from posttune.data.conversion import ConversionReport
    from posttune.data.dataset import SampleDataset
    from posttune.data.inspect import Inspection

F = TypeVar("F", bound=Callable[..., Any])
SHOWN_REJECTED = 10


@click.group("data", epilog=example("posttune data convert train.jsonl --to data/train"))
def command() -> None:
    """Convert source files to datasets, and look at what is in them."""


def _reading_options(function: F) -> F:
    """What says how rows are read: common to both commands."""
    options = (
        click.option(
            "--converter",
            metavar="NAME[:JSON]",
            help='Converter, perhaps with options (gsm8k:{"annotations": true}); inferred from the roles.',
        ),
        click.option(
            "--map",
            "mapping",
            multiple=True,
            metavar="ROLE=PATH",
            help="Column of a role, as a dotted path. Roles: prompt, response (or answer), chosen, rejected, "
            "messages, text, reference.",
        ),
        click.option(
            "--tokenizer", metavar="PATH", help='Tokenizer folder, or "bytes"; without one the text is kept.'
        ),
        click.option(
            "--template", default="auto", show_default=True, metavar="auto|none|PATH", help="Chat template."
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


@command.command(
    "convert",
    epilog=example(
        "posttune data convert train.jsonl --to data/train --map prompt=question --map response=answer",
        "posttune data convert gsm8k/*.jsonl --to data/gsm8k --converter gsm8k --tokenizer models/smollm2",
    ),
)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("--to", required=True, metavar="DIR", help="Folder of the dataset.")
@_reading_options
@click.option(
    "--on-bad-row",
    type=click.Choice(["refuse", "skip"]),
    default="refuse",
    show_default=True,
    help="Refuse all because of a bad row, or leave it out and list it.",
)
@click.option("--max-length", type=click.IntRange(min=1), help="Tokens of a whole row.")
@click.option(
    "--truncation",
    type=click.Choice(["left", "right", "middle", "refuse"]),
    default="refuse",
    show_default=True,
    help="Where a longer row is cut.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Processes; by default one a processor, if it pays.")
@click.option("--overwrite", is_flag=True, help="Replace another dataset at the same place.")
@json_option
def convert_command(
    sources: tuple[str, ...],
    to: str,
    converter: str | None,
    mapping: tuple[str, ...],
    tokenizer: str | None,
    template: str,
    on_bad_row: Any,
    max_length: int | None,
    truncation: Any,
    jobs: int | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Convert SOURCE files (JSON lines, JSON, CSV, Parquet, Arrow; also compressed) to one dataset."""
    from posttune.data.conversion import ConvertRequest, convert
    from posttune.data.progress import conversion_bar

    with only_json(as_json), conversion_bar("converting") as progress:
        report = convert(
            ConvertRequest(
                sources=sources,
                to=to,
                converter=_reference(converter),
                map=_mapping(mapping),
                tokenizer=tokenizer,
                template=template,
                on_bad_row=on_bad_row,
                max_length=max_length,
                truncation=truncation,
                overwrite=overwrite,
                progress=progress,
                jobs=jobs,
            )
        )
    if as_json:
        emit_json(report.as_json())
    else:
        _show_report(report)


@command.command(
    "inspect",
    epilog=example(
        "posttune data inspect data/train --rows 5",
        "posttune data inspect train.jsonl --tokenizer models/smollm2 --against data/test",
        "posttune data inspect data/gsm8k --reward gsm8k --overfit 10 --model models/smollm2",
    ),
)
@click.argument("path")
@click.option("--rows", type=click.IntRange(min=0), default=3, show_default=True, help="Rows to show.")
@click.option("--against", metavar="PATH", help="Another dataset or file whose prompts should not be in it.")
@click.option("--reward", "rewards", multiple=True, metavar="NAME[:JSON]", help="Say what this reward lacks.")
@click.option("--overfit", "steps", type=click.IntRange(min=1), help="Train so many steps on a few rows.")
@click.option("--model", metavar="PATH", help="Model of --overfit; without one a tiny new model.")
@_reading_options
@json_option
def inspect_command(
    path: str,
    rows: int,
    against: str | None,
    rewards: tuple[str, ...],
    steps: int | None,
    model: str | None,
    converter: str | None,
    mapping: tuple[str, ...],
    tokenizer: str | None,
    template: str,
    as_json: bool,
) -> None:
    """Show what is in PATH, a dataset or a source file: first rows, lengths, odd texts, duplicates."""
    from posttune.cli.reward_options import parse_rewards
    from posttune.data.conversion import ConvertRequest, convert
    from posttune.data.dataset import SampleDataset
    from posttune.data.inspect import inspect_dataset
    from posttune.data.layout import TRAIN, is_dataset

    with only_json(as_json), tempfile.TemporaryDirectory() as scratch:

        def opened(source: str, name: str) -> SampleDataset:
            place = Path(source).expanduser()
            if place.name == TRAIN or (place / TRAIN).is_file() or is_dataset(place):
                return SampleDataset(place)
            request = ConvertRequest(
                sources=[source],
                to=Path(scratch, name),
                converter=_reference(converter),
                map=_mapping(mapping),
                tokenizer=tokenizer,
                template=template,
                on_bad_row="skip",
            )
            return SampleDataset(convert(request).path)

        other = opened(against, "other") if against is not None else None
        own = opened(path, "own")
        found = inspect_dataset(own, rows=rows, against=other, rewards=parse_rewards(rewards))
        if steps is not None:
            from posttune.trainer.overfit import overfit

            found = replace(found, overfit=overfit(own, steps=steps, model=model))
    if as_json:
        emit_json({**_plain_inspection(found), "path": path})
    else:
        _show_inspection(found, path)


def _show_trial(found: Inspection) -> None:
    for lack in found.lacking:
        click.echo(f"reward {lack.reward} needs {lack.column}: {lack.rows} of {found.rows} rows have none")
    if found.overfit is not None:
        trial = found.overfit
        click.echo(f"{trial.rows} rows, {trial.tokens} trained tokens: {trial.verdict}")


def _reference(text: str | None) -> PluginRef | None:
    """``NAME`` or ``NAME:{json}``."""
    if text is None:
        return None
    name, colon, options = text.partition(":")
    try:
        value = json.loads(options) if colon else {}
    except ValueError as error:
        what = f"the options after the colon are no JSON: {error}"
        raise UserError(what, who=f"--converter {text}", fix='write NAME:{"option": value}') from error
    if not isinstance(value, dict):
        what = "the options are no JSON object"
        raise UserError(what, who=f"--converter {text}", fix='write NAME:{"option": value}')
    return PluginRef(name=name, options=value)


def _mapping(pairs: tuple[str, ...]) -> dict[str, str]:
    mapping: dict[str, str] = {}
    for pair in pairs:
        role, equals, path = pair.partition("=")
        if not equals or not role or not path:
            raise UserError("is no ROLE=PATH", who=f"--map {pair}", fix="write it like prompt=question")
        if role in mapping:
            raise UserError(f"role {role!r} is mapped twice", who=f"--map {pair}", fix="map it once")
        mapping[role] = path
    return mapping


def _show_report(report: ConversionReport) -> None:
    from posttune.data.inspect import visible

    state = " (it was there already)" if report.unchanged else ""
    click.echo(f"{report.rows_out} of {report.rows_in} rows in {report.path}{state}")
    for entry in report.rejected[:SHOWN_REJECTED]:
        click.echo(f"  left out {entry['file']}:{entry['row']}: {visible(entry['reason'])}")
    if len(report.rejected) > SHOWN_REJECTED:
        more = len(report.rejected) - SHOWN_REJECTED
        click.echo(f"  … and {more} more: see {report.path / 'rejected.jsonl'}")
    for warning in report.warnings:
        click.echo(f"  warning: {warning['code']} in {warning['count']}")


def _plain_inspection(found: Inspection) -> dict[str, Any]:
    from posttune.cli.output import plain

    document: dict[str, Any] = plain(found)
    return document


def _show_inspection(found: Inspection, path: str) -> None:
    from posttune.data.inspect import visible

    _show_samples(found)
    click.echo(f"{path}: {found.rows} rows, template {found.template}, {found.rejected} left out")
    print_table(["column", "rows with a value"], [[name, count] for name, count in found.columns.items()])
    keys = ("min", "mean", "p50", "p95", "max")
    parts = {name: found.lengths[name] for name in ("prompt", "response", "total")}
    table = [[name, *(part.get(key) for key in keys)] for name, part in parts.items()]
    print_table([found.lengths["unit"], *keys], table)
    for entry in found.rejected_examples:
        click.echo(f"left out {entry['file']}:{entry['row']}: {visible(entry['reason'])}")
    for warning in found.warnings:
        click.echo(f"warning: {warning['code']} in {warning['count']}")
    _show_oddities(found)
    _show_trial(found)
    if found.overlap is not None:
        where = f" ({', '.join(found.overlap.examples)})" if found.overlap.examples else ""
        click.echo(f"{found.overlap.rows} of {found.overlap.of} prompts of the other are here too{where}")


def _show_samples(found: Inspection) -> None:
    from rich.text import Text

    from posttune.cli.output import console
    from posttune.data.inspect import visible

    screen = console()
    for sample in found.samples:
        count = f", {sample.trained_tokens} of {sample.tokens} tokens trained" if sample.tokens else ""
        screen.print(Text(f"── {sample.file}:{sample.row}{count}", style="bold"))
        line = Text()
        for piece in sample.pieces:
            line.append(visible(piece.text), style="green" if piece.trained else "dim")
        screen.print(line)


def _show_oddities(found: Inspection) -> None:
    from posttune.data.inspect import visible

    for oddity in found.oddities:
        excerpt = visible(" ".join(oddity.excerpt.split()))
        click.echo(f"  {oddity.file}:{oddity.row} {oddity.column}: {', '.join(oddity.codes)}: {excerpt}")
