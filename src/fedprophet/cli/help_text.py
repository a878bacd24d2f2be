"""Help as plain text, with any release of typer and click.

typer 0.20 escapes brackets for rich even in plain help, and with click 8.5 its arguments lose their help and are listed
twice. This writes the lists of arguments and options itself.
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.utils import get_params_from_function

EXAMPLES = re.compile(r"\s*Examples?:\s*(?=fedprophet )")
"""What stands between a text and its examples."""


class Summarised:
    """What has a summary, which a list of commands shows whole: click would cut it off."""

    help: str | None

    @property
    def summary(self) -> str:
        """The first paragraph of what it says of itself, as one line."""
        return EXAMPLES.split(self.help or "")[0].partition("\n\n")[0].replace("\n", " ")

    def get_short_help_str(self, limit: int = 0) -> str:
        return self.summary


class PlainGroup(Summarised, TyperGroup):
    """A group of commands with plain help."""


class PlainCommand(Summarised, TyperCommand):
    """A command with plain help."""

    def format_arguments(self, ctx: Any, formatter: Any) -> None:
        """Write nothing: `format_options` writes the arguments too."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for title, rows in self.explained(ctx):
            with formatter.section(title):
                formatter.write_dl(rows)

    def explained(self, ctx: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        """Yield "Arguments" and "Options", where there are any, with the name and meaning of each."""
        declared = get_params_from_function(inspect.unwrap(self.callback)) if self.callback else {}
        parameters = self.get_params(ctx)
        for parameter in parameters:
            if parameter.name in declared and getattr(parameter, "help", None) is None:
                vars(parameter)["help"] = getattr(declared[parameter.name].default, "help", None)
        for title, kind in {"Arguments": "argument", "Options": "option"}.items():
            rows = [parameter.get_help_record(ctx) for parameter in parameters if parameter.param_type_name == kind]
            shown = [(row[0], row[1].replace("\\[", "[")) for row in rows if row is not None]
            if shown:
                yield title, shown


def use_plain_help(app: typer.Typer) -> None:
    """Give all commands of an app, and of its groups, plain help."""
    for command in app.registered_commands:
        command.cls = PlainCommand
    for group in app.registered_groups:
        group.cls = PlainGroup
        if group.typer_instance is not None:
            use_plain_help(group.typer_instance)
