"""The reference page of every command, made from the commands themselves.

It is for whoever changes a command, so it is no command of its own:

    python -m fedprophet.cli.reference > docs/reference/commands.md
"""

import re
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from fedprophet.cli import app
from fedprophet.cli.help_text import EXAMPLES, PlainCommand

PROGRAM = "fedprophet"
_HEAD = """\
# Commands

<!-- Made by `python -m fedprophet.cli.reference` from the commands; edit those instead. -->

Every command has `--help`. `--json` prints what programs read. Exit codes: 0 for success, 2 for an error that you can
fix (the message says how), 130 after Ctrl-C.

| command | what it does |
| --- | --- |
"""
_NOTE = re.compile(r"\s\s\[(.*)\]$")


def commands_markdown() -> str:
    """Return the reference page of every command: what it does, its arguments, options, defaults and examples."""
    commands = dict(_commands(get_command(app), (PROGRAM,)))
    listed = (f"| [`{name}`](#{name.replace(' ', '-')}) | {command.summary} |" for name, command in commands.items())
    sections = (_section(name, command) for name, command in commands.items())
    return _HEAD + "\n".join(listed) + "\n\n" + "\n".join(sections)


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, PlainCommand]]:
    if isinstance(command, PlainCommand):
        yield " ".join(path), command
        return
    for name, inner in command.commands.items():
        yield from _commands(inner, (*path, name))


def _texts(command: PlainCommand) -> tuple[str, list[str]]:
    """Return what a command says of itself, and its examples."""
    about, *examples = EXAMPLES.split(command.help or "")
    return about, [line.strip() for text in examples for line in re.split(r"\s{2,}(?=fedprophet )", text)]


def _section(name: str, command: PlainCommand) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    about, examples = _texts(command)
    usage = " ".join((name, *command.collect_usage_pieces(context)))
    parts = [f"## {name}", about, f"```text\n{usage}\n```"]
    parts += ["\n".join(f"    {example}" for example in examples)] if examples else []
    parts += [_table(title, rows) for title, rows in command.explained(context) if rows[0][0] != "--help"]
    return "\n\n".join(parts) + "\n"


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    lines = [f"| {title.lower()} | meaning | default, limits |", "| --- | --- | --- |"]
    for names, text in (row for row in rows if row[0] != "--help"):
        note = _NOTE.search(text)
        cells = (f"`{names}`", _NOTE.sub("", text), note[1] if note else "")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(commands_markdown(), end="")
