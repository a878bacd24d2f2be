"""Lines in a terminal and in a pipe."""

import io

import pytest
from rich.console import Console

from fedprophet.display.lines import say

RESUME = "fedprophet train --resume runs/ctrlc"
STOPPED = "stopped in round 3; nothing is lost. Resume it with: "


def said(text, width=30, terminal=True):
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    say(console, text)
    return console.file.getvalue().splitlines()


def test_a_terminal_breaks_lines_between_words():
    assert said("one two three four five six seven\n  eight") == ["one two three four five six", "seven", "  eight"]
    assert said("a word-that-is-longer-than-thirty-characters b") == [
        "a",
        "word-that-is-longer-than-thirty-characters",
        "b",
    ]


def test_a_pipe_gets_whole_lines():
    assert said(f"{STOPPED}{RESUME}", terminal=False) == [f"{STOPPED}{RESUME}"]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (100, [f"{STOPPED}{RESUME}"]),
        (60, ["stopped in round 3; nothing is lost. Resume it with:", RESUME]),
        (30, ["stopped in round 3; nothing is", "lost. Resume it with:", RESUME]),
    ],
)
def test_a_command_at_the_end_is_one_line_that_can_be_copied(width, lines):
    assert said(f"{STOPPED}{RESUME}", width) == lines


def test_what_follows_a_command_is_no_part_of_it():
    """It is broken between words like other text, and so is a command within a sentence."""
    assert said("Get it with: pip install 'fedprophet[plots]'. Or leave it out: --no-plot", 40) == [
        "Get it with: pip install",
        "'fedprophet[plots]'. Or leave it out:",
        "--no-plot",
    ]
    assert said(f"It holds a run. Resume it with: {RESUME}, or give another folder", 40) == [
        "It holds a run. Resume it with:",
        "fedprophet train --resume runs/ctrlc, or",
        "give another folder",
    ]
    assert said("Show it: fedprophet deploy logs pilot. End it: fedprophet deploy stop pilot", 40) == [
        "Show it: fedprophet deploy logs pilot.",
        "End it:",
        "fedprophet deploy stop pilot",
    ]
