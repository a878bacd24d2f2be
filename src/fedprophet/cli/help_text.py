"""Help texts as plain text, whichever releases of typer and click are installed."""

import inspect
from typing import Any

import typer
from typer.core import TyperCommand
from typer.models import ParameterInfo
from typer.utils import get_params_from_function


class PlainCommand(TyperCommand):
    """A command whose help has neither rich's escapes nor arguments without a word.

    typer 0.20 escapes brackets for rich even where help is plain, and with click 8.5 its arguments lose their texts.
    """

    def __init__(self, name: str | None, **settings: Any) -> None:
        """Give the arguments back what their declarations say."""
        super().__init__(name, **settings)
        declared = get_params_from_function(inspect.unwrap(self.callback)) if self.callback else {}
        for parameter in self.params:
            about = declared[parameter.name].default if parameter.name in declared else None
            if isinstance(about, ParameterInfo) and getattr(parameter, "help", None) is None:
                vars(parameter)["help"] = about.help

    def format_arguments(self, ctx: Any, formatter: Any) -> None:
        """Leave it to `format_options`; click 8.5 would write the arguments twice."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options."""
        parameters = self.get_params(ctx)
        for title, kind in {"Arguments": "argument", "Options": "option"}.items():
            rows = [parameter.get_help_record(ctx) for parameter in parameters if parameter.param_type_name == kind]
            shown = [(row[0], row[1].replace("\\[", "[")) for row in rows if row is not None]
            if shown:
                with formatter.section(title):
                    formatter.write_dl(shown)


def make_plain(app: typer.Typer) -> None:
    """Let all commands of a command line, and of its groups, show plain help."""
    for command in app.registered_commands:
        command.cls = PlainCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            make_plain(group.typer_instance)
