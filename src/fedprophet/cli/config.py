"""`fedprophet config`: look at configurations."""

import json
from typing import Annotated

import typer

from fedprophet.config.config import PRESETS, load_config, reference_markdown, to_toml

config_app = typer.Typer(help="Look at configurations: every key, its value and its meaning.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@config_app.command()
def show(
    source: Annotated[str | None, typer.Argument(metavar="[PRESET|FILE]", help="Default: the preset digits.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key; may be repeated.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="Short for --set method=…")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the resolved configuration as TOML that can be saved, edited and used.

    Examples:

      fedprophet config show digits > mine.toml

      fedprophet config show cifar10-balanced --method heterofl
    """
    config = load_config(source, [*(overrides or ()), *([f"method={method}"] if method else ())])
    text = json.dumps(config.model_dump(), indent=2) + "\n" if as_json else to_toml(config, comments=True)
    typer.echo(text, nl=False)


@config_app.command()
def presets(as_json: AsJson = False) -> None:
    """List the presets that ship."""
    width = max(map(len, PRESETS))
    text = (
        json.dumps(dict(PRESETS), indent=2) if as_json else "\n".join(f"{n:{width}}  {t}" for n, t in PRESETS.items())
    )
    typer.echo(text)


@config_app.command()
def reference() -> None:
    """Print the reference page of every key, in Markdown."""
    typer.echo(reference_markdown(), nl=False)
