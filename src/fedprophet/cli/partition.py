"""`fedprophet partition`: what a model costs to train, and the modules that fit a memory budget."""

from typing import Annotated, Any

import typer

from fedprophet.cascade.cost import ChainCost
from fedprophet.cascade.partition import Module, partition
from fedprophet.cli.options import Batch, Classes, InputShape, ModelName, Optimizer, model_cost, print_json
from fedprophet.display.numbers import counted, percent
from fedprophet.display.tables import Column, Page, Table, show
from fedprophet.sizes import format_count, format_size, parse_budget


def partition_command(
    model: ModelName,
    budget: Annotated[str, typer.Option(help="Memory of one module: 60MB, 64MiB, bytes, or 25% of the whole model.")],
    input_: InputShape = "3x32x32",
    classes: Classes = 10,
    batch: Batch = 64,
    optimizer: Optimizer = "sgd-momentum",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON, all sizes in bytes.")] = False,
) -> None:
    """Cut a model into modules that can each be trained within a memory budget (the paper's Algorithm 1).

    Example: fedprophet partition vgg16 --input 3x32x32 --classes 10 --batch 64 --budget 60MB
    """
    cost = model_cost(model, input_, classes, batch, optimizer)
    bytes_ = parse_budget(budget, cost.total_memory)
    modules = partition(cost, bytes_)
    if json_:
        print_json(_document(model, cost, bytes_, modules))
    else:
        show(_page(model, cost, bytes_, modules))


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


def _page(model: str, cost: ChainCost, budget: int, modules: tuple[Module, ...]) -> Page:
    columns = (
        Column("Module"),
        Column("Layers", form=", ".join, words=True),
        Column("Memory", form=_size),
        Column("of budget", form=percent),
        Column("FLOPs", form=format_count),
        Column("Parameters", form=format_count),
    )
    rows = ((m.index + 1, _layers(cost, m), m.memory, m.memory / budget, m.flops, m.parameters) for m in modules)
    whole = (
        f"whole model {_size(cost.total_memory)}, budget {percent(budget / cost.total_memory)} of it, "
        f"{counted(len(modules), 'module')}, {format_count(cost.total_flops)} FLOPs, "
        f"{format_count(cost.total_parameters)} parameters"
    )
    title = f"{model}, batch {cost.batch}, budget {_size(budget)}"
    return Page(title, (Table("", columns, tuple(rows)),), notes=(whole,))


def _size(size: int) -> str:
    return format_size(size, 2)
