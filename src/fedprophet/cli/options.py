"""Options that several commands share, and what is made of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import torch
import typer
from rich.text import Text

from fedprophet.cascade.atoms import chain_of
from fedprophet.cascade.cost import COPIES, ChainCost, cost_of
from fedprophet.client.planned_cost import MeasuredCost
from fedprophet.console import console_on
from fedprophet.display.lines import say
from fedprophet.display.tables import Page, show
from fedprophet.errors import ConfigError, unknown
from fedprophet.messages.values import LocalTraining
from fedprophet.models import MODELS, build
from fedprophet.sizes import parse_shape
from fedprophet.storage.files import make_folder
from fedprophet.tracking import TRACKERS

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key; may be repeated.")
]
MethodName = Annotated[str | None, typer.Option(help="Short for --set method=…; fedprophet methods lists them.")]
Logs = Annotated[
    list[str] | None,
    typer.Option("--log", metavar="TRACKER", help=f"Log each round to {', '.join(TRACKERS)}; may be repeated."),
]
ModuleBudget = Annotated[str, typer.Option(help="Memory of one module: 60MB, 64MiB, bytes, or 25% of the whole model.")]
ModelName = Annotated[str, typer.Argument(help=f"One of {', '.join(MODELS)}.")]
InputShape = Annotated[str, typer.Option("--input", help="Shape of one input.")]
Classes = Annotated[int, typer.Option(help="Number of classes.", min=2, max=10**6)]
Batch = Annotated[int, typer.Option(help="Samples in a local batch.", min=1, max=10**6)]
MEMORY_MODELS = ("paper", "measured")
MemoryModel = Annotated[
    str, typer.Option(help="Count by the paper's model of memory, or by what training is predicted to take: measured.")
]
MOMENTA = {"sgd": 0.0, "sgd-momentum": 0.9}
Optimizer = Annotated[str, typer.Option(help=f"The clients' optimizer: {', '.join(COPIES)}.")]
PredictedOptimizer = Annotated[str, typer.Option("--optimizer", help=f"The clients' optimizer: {', '.join(MOMENTA)}.")]


def tell(text: str, err: bool = False) -> None:
    """Print a line for people; `err`: to standard error, beside what the command is asked for."""
    say(console_on(err), text)


def print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2))


def print_result(document: Any, page: Page, as_json: bool) -> None:
    """Print a document as JSON, or as the page of it that people read."""
    if as_json:
        print_json(document)
    else:
        show(page)


def print_listing(entries: Mapping[str, str], as_json: bool) -> None:
    """Print names and their lines of help: one line each, wrapped beside the names in a terminal."""
    if as_json:
        print_json(dict(entries))
        return
    console, width = console_on(), max(map(len, entries))
    for name, text in entries.items():
        lines = [Text(text)]
        if console.is_terminal:
            lines = list(Text(text).wrap(console, max(console.width - width - 2, 20)))
        for number, line in enumerate(lines):
            console.print(Text(f"{'' if number else name:{width}}  ") + line, soft_wrap=True)


def with_method(overrides: list[str] | None, **short: str | None) -> list[str]:
    """Return the overrides, and those that have an option of their own, such as --method."""
    return [*(overrides or ()), *(f"{key}={value}" for key, value in short.items() if value is not None)]


def model_cost(
    model: str,
    shape: str,
    classes: int,
    batch: int,
    optimizer: str,
    memory_model: str = "paper",
    place: torch.device | None = None,
) -> ChainCost:
    """Return what a model costs; `measured` memory is predicted for a device, a CPU if none is given."""
    if memory_model not in MEMORY_MODELS:
        raise ConfigError(f"--memory-model: {unknown('model of memory', memory_model, MEMORY_MODELS)}")
    _expect_known(optimizer)
    size = parse_shape(shape)
    if len(size) != len(("channels", "height", "width")):
        raise ConfigError(f"--input {shape}: models take images of channels x height x width, such as 3x32x32")
    with torch.device("meta"):  # the cost does not need weights: models of any size are built at once
        chain = chain_of(build(model, size, classes))
    cost = cost_of(chain, size, batch, classes, COPIES[optimizer])
    return cost if memory_model == "paper" else MeasuredCost.of(cost, chain, training_of(optimizer, batch), place)


def training_of(optimizer: str, batch: int) -> LocalTraining:
    """Return the hyper-parameters of local training, of which its memory depends on the optimizer and the batch."""
    _expect_known(optimizer)
    if optimizer not in MOMENTA:
        raise ConfigError(
            f"--optimizer {optimizer}: local training is SGD, and only its memory can be predicted. "
            f"Give one of {', '.join(MOMENTA)}"
        )
    return LocalTraining(1, batch, 1e-3, momentum=MOMENTA[optimizer], weight_decay=1e-4, strong_convexity=1e-5)


def _expect_known(optimizer: str) -> None:
    if optimizer not in COPIES:
        raise ConfigError(f"--optimizer: {unknown('optimizer', optimizer, COPIES)}")


def open_folder(folder: Path | None) -> None:
    """Create the folder of --out, if given, and check that it can be written to before the work for it is done."""
    if folder is None:
        return
    try:
        make_folder(folder)
        with TemporaryFile(dir=folder):
            pass
    except FileExistsError as error:
        raise ConfigError(f"{error.filename} is a file. Give a folder with --out") from error
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder}: {error.strerror}. Make it writable or give another folder with --out"
        ) from error
