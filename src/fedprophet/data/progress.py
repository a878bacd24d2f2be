"""A progress bar on standard error: in a terminal only, and gone when the work is done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def progress(text: str, total: int | None, done: int = 0, *, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a bar while the block runs; call what it gives with the number of items, or bytes, that are done anew."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda count: None
        return
    counts = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *counts, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text, total=total, completed=done)
        yield lambda count: bar.advance(task, count)
