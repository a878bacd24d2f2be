"""`fedprophet config`: look at configurations."""

import json
from typing import Annotated

import typer

from fedprophet.cli.options import AsJson, MethodName, Overrides, print_listing, with_method
from fedprophet.config.load import PRESETS, load_config
from fedprophet.config.reference import reference_markdown, to_toml

config_app = typer.Typer(help="Look at configurations: all keys, their values and meanings.", no_args_is_help=True)


@config_app.command()
def show(
    source: Annotated[str | None, typer.Argument(metavar="[PRESET|FILE]", help="Default: the preset digits.")] = None,
    overrides: Overrides = None,
    method: MethodName = None,
    as_json: AsJson = False,
) -> None:
    """Print the resolved configuration as TOML that can be saved, edited and used.

    Examples:

      fedprophet config show digits > mine.toml

      fedprophet config show cifar10-balanced --method heterofl
    """
    config = load_config(source, with_method(overrides, method=method))
    text = json.dumps(config.model_dump(), indent=2) + "\n" if as_json else to_toml(config, comments=True)
    typer.echo(text, nl=False)


@config_app.command()
def presets(as_json: AsJson = False) -> None:
    """List the presets. Example: fedprophet config presets"""
    print_listing(PRESETS, as_json)


@config_app.command()
def reference() -> None:
    """Print the reference of all keys as Markdown. Example: fedprophet config reference"""
    typer.echo(reference_markdown(), nl=False)
