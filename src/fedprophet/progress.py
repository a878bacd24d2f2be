"""A progress bar on standard error: in a terminal only, and gone when the work is done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from fedprophet.console import console_on

Watch = Callable[[str, int, int | None], None]
"""Is told what is being done, how much of it is done, and how much there is (None: unknown)."""


def unwatched(what: str, done: int, total: int | None) -> None:
    """Ignore the progress."""


@contextmanager
def progress_bar(*, in_bytes: bool = False) -> Iterator[Watch]:
    """Show what the block tells the watch that it is given; a bar counts items, or bytes."""
    console = console_on(err=True)
    counts = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(30), *counts, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        shown = bar.add_task("starting", total=None)

        def watch(what: str, done: int, total: int | None) -> None:
            nonlocal shown
            if bar.tasks[0].description != what:  # a new task: its speed is measured from its own beginning
                bar.remove_task(shown)
                shown = bar.add_task(what, total=total, completed=done)
            bar.update(shown, completed=done, total=total)

        yield watch
