"""`fedprophet partition`: what a model costs to train, and the modules that fit a memory budget."""

import json
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from fedprophet.cascade.atoms import chain_of
from fedprophet.cascade.cost import COPIES, ChainCost, cost_of
from fedprophet.cascade.partition import Module, partition
from fedprophet.errors import ConfigError, unknown
from fedprophet.models import MODELS, build
from fedprophet.sizes import format_count, format_size, parse_budget, parse_shape


def partition_command(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(MODELS)}.")],
    budget: Annotated[str, typer.Option(help="Memory of one module: 60MB, 64MiB, bytes, or 25% of the whole model.")],
    input_: Annotated[str, typer.Option("--input", help="Shape of one input.")] = "3x32x32",
    classes: Annotated[int, typer.Option(help="Number of classes.", min=2)] = 10,
    batch: Annotated[int, typer.Option(help="Samples in a local batch.", min=1)] = 64,
    optimizer: Annotated[str, typer.Option(help=f"What the clients train with: {', '.join(COPIES)}.")] = "sgd-momentum",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON, all sizes in bytes.")] = False,
) -> None:
    """Cut a model into modules that each train within a memory budget (the paper's Algorithm 1).

    Example: fedprophet partition vgg16 --input 3x32x32 --classes 10 --batch 64 --budget 60MB
    """
    if optimizer not in COPIES:
        raise ConfigError(f"--optimizer: {unknown('optimizer', optimizer, COPIES)}")
    shape = parse_shape(input_)
    with torch.device("meta"):  # A cost needs no weights: a model of any size is built at once.
        chain = chain_of(build(model, shape, classes))
    cost = cost_of(chain, shape, batch, classes, COPIES[optimizer])
    bytes_ = parse_budget(budget, cost.total_memory)
    modules = partition(cost, bytes_)
    if json_:
        typer.echo(json.dumps(_document(model, cost, bytes_, modules), indent=2))
    else:
        _show(model, cost, bytes_, modules)


def _document(model: str, cost: ChainCost, budget: int, modules: tuple[Module, ...]) -> dict[str, Any]:
    return {
        "model": model,
        "parameters": cost.total_parameters,
        "total_memory_bytes": cost.total_memory,
        "total_flops": cost.total_flops,
        "budget_bytes": budget,
        "modules": [
            {
                "index": module.index + 1,
                "atoms": [atom.name for atom in cost.atoms[module.first : module.last]],
                "layers": _layers(cost, module),
                "memory_bytes": module.memory,
                "flops": module.flops,
                "parameters": module.parameters,
            }
            for module in modules
        ],
    }


def _layers(cost: ChainCost, module: Module) -> list[str]:
    return [layer for atom in cost.atoms[module.first : module.last] for layer in atom.layers]


def _show(model: str, cost: ChainCost, budget: int, modules: tuple[Module, ...]) -> None:
    table = Table(title=f"{model}, batch {cost.batch}, budget {format_size(budget, 2)}", show_lines=True)
    table.add_column("Module", justify="right")
    table.add_column("Layers")
    for heading in ("Memory", "of budget", "FLOPs", "Parameters"):
        table.add_column(heading, justify="right", no_wrap=True)
    for module in modules:
        table.add_row(
            str(module.index + 1),
            "\n".join(_layers(cost, module)),
            format_size(module.memory, 2),
            f"{module.memory / budget:.1%}",
            format_count(module.flops),
            format_count(module.parameters),
        )
    Console(highlight=False).print(table)
    typer.echo(
        f"whole model {format_size(cost.total_memory, 2)}, budget {budget / cost.total_memory:.1%} of it, "
        f"{len(modules)} {'module' if len(modules) == 1 else 'modules'}, {format_count(cost.total_flops)} FLOPs, "
        f"{format_count(cost.total_parameters)} parameters"
    )
