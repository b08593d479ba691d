"""How commands speak: one JSON document or tables on stdout; everything else on stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

T = TypeVar("T")

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document; messages go to stderr."
)


def example(*lines: str) -> str:
    """An epilog for ``--help``: command lines, shown as they are."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def emit_json(document: Any) -> None:
    """Write one JSON document to stdout. NaN and infinity, which JSON lacks, become null."""
    unicode = str(sys.stdout.encoding).lower().startswith("utf")
    click.echo(json.dumps(plain(document), indent=2, ensure_ascii=not unicode))


def plain(value: Any) -> Any:
    """The same as dicts, lists and scalars that JSON knows."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


@contextlib.contextmanager
def only_json(as_json: bool) -> Iterator[None]:
    """While a command works under ``--json``, what others print goes to stderr."""
    if not as_json:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield


def console() -> Console:
    """Rich, on stdout."""
    from rich.console import Console

    return Console(highlight=False)


def messages() -> Console:
    """Rich, on stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> None:
    """A table on stdout. Columns of numbers are aligned to the right."""
    from rich.table import Table

    table = Table(title=title or None, title_justify="left")
    for index, name in enumerate(columns):
        cells = [row[index] for row in rows]
        right = bool(cells) and all(_is_number(cell) for cell in cells)
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(number(cell) for cell in row))
    console().print(table, markup=False)


def _is_number(cell: object) -> bool:
    return isinstance(cell, int | float) or (isinstance(cell, str) and cell.replace(".", "", 1).isdigit())


def number(value: object) -> str:
    """A cell's text: at most four significant digits after the integer part."""
    if isinstance(value, bool) or value is None:
        return "" if value is None else ("yes" if value else "no")
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


@contextlib.contextmanager
def progress(description: str, total: int | None = None) -> Iterator[Progress]:
    """A progress bar on stderr, shown on a terminal only. Its one task has the id 0."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    screen = messages()
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        bar.add_task(description, total=total)
        yield bar
