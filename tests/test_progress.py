"""The progress bar: in a terminal alone, one line, and gone at the end."""

import io

import pytest
from rich.console import Console

from fedprophet import progress


@pytest.mark.parametrize(("in_bytes", "shown"), [(False, "3/4"), (True, "3/4 bytes")])
def test_a_terminal_shows_the_work_at_hand(monkeypatch, in_bytes, shown):
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(progress, "console_on", lambda err: console)
    with progress.progress_bar(in_bytes=in_bytes) as watch:
        for what, done, total in (("first", 1, 4), ("first", 3, 4), ("[second]", 0, None)):
            watch(what, done, total)
            console._live_stack[0].refresh()
    text = console.file.getvalue()
    assert "starting" not in text.split("first")[-1]
    assert text.index("first") < text.index(shown) < text.index("[second]")
    assert text.endswith("\x1b[2K"), "the bar is erased"


def test_elsewhere_it_is_quiet(monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=False)
    monkeypatch.setattr(progress, "console_on", lambda err: console)
    with progress.progress_bar() as watch:
        watch("work", 1, 2)
    assert console.file.getvalue() == ""
