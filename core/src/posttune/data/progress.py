"""A progress bar for conversions that take a while, on stderr and on a terminal only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from posttune.data.row_stream import Progress


@contextmanager
def conversion_bar(description: str) -> Iterator[Progress]:
    """Yield what a conversion reports to. The bar vanishes at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rows]:,} rows"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=1.0, rows=0)
        yield lambda rows, share: bar.update(task, completed=share, rows=rows)
