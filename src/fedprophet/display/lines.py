"""Lines for people: in a terminal broken between words, with a command that can be copied; whole elsewhere."""

import re
from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

COMMAND = re.compile(r"(?P<before>.*:) (?P<command>(?:fedprophet|flwr|pip) (?:(?!, |\. ).)*)")
"""A line that ends with what is to be typed, as in `Resume it with: fedprophet train --resume runs/a`."""
WORD = re.compile(r"\s*\S+")
"""A word and the space before it."""


def say(console: Console, text: str, style: str = "") -> None:
    """Print a line, or several. A pipe gets them as they are."""
    for line in broken(text, console.width) if console.is_terminal else [text]:
        console.print(Text(line, style=style), soft_wrap=True)


def broken(text: str, width: int) -> Iterator[str]:
    """Yield the lines of a text: a long one is broken between words, and a command at its end has a line of its own.

    A word or a command longer than the terminal is wide is left to the terminal, which copies it as one line.
    """
    for line in text.split("\n"):
        found = COMMAND.fullmatch(line) if cell_len(line) > width else None
        yield from _between_words(found["before"] if found else line, width)
        if found:
            yield found["command"]


def _between_words(line: str, width: int) -> Iterator[str]:
    taken = ""
    for word in WORD.findall(line):
        if taken and cell_len(taken + word) > width:
            yield taken
            taken = word.lstrip()
        else:
            taken += word
    yield taken
