"""`fedprophet partition`: what a model costs to train, and the modules that fit a memory budget."""

from typing import Annotated, Any

import typer

from fedprophet.cascade.cost import ChainCost
from fedprophet.cascade.partition import Module, partition
from fedprophet.cli.options import (
    Batch,
    Classes,
    InputShape,
    MemoryModel,
    ModelName,
    ModuleBudget,
    Optimizer,
    model_cost,
    print_result,
)
from fedprophet.display.numbers import counted, percent
from fedprophet.display.tables import Column, Page, Table
from fedprophet.progress import progress_bar
from fedprophet.sizes import format_count, format_size, parse_budget


def partition_command(
    model: ModelName,
    budget: ModuleBudget,
    input_: InputShape = "3x32x32",
    classes: Classes = 10,
    batch: Batch = 64,
    optimizer: Optimizer = "sgd-momentum",
    memory_model: MemoryModel = "paper",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON, all sizes in bytes.")] = False,
) -> None:
    """Cut a model into modules that can each be trained within a memory budget (the paper's Algorithm 1).

    Example: fedprophet partition vgg16 --input 3x32x32 --classes 10 --batch 64 --budget 60MB
    """
    cost = model_cost(model, input_, classes, batch, optimizer, memory_model)
    with progress_bar() as watch:
        watch("counting memory", 0, None)
        bytes_ = parse_budget(budget, cost.total_memory)
        modules = partition(cost, bytes_)
    document = {"memory_model": memory_model, **_document(model, cost, bytes_, modules)}
    print_result(document, _page(document, batch), json_)


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
                "layers": [layer for atom in cost.atoms[module.first : module.last] for layer in atom.layers],
                "memory_bytes": module.memory,
                "flops": module.flops,
                "parameters": module.parameters,
            }
            for module in modules
        ],
    }


def _page(found: dict[str, Any], batch: int) -> Page:
    budget, whole = found["budget_bytes"], found["total_memory_bytes"]
    columns = {
        "index": Column("Module"),
        "layers": Column("Layers", form=", ".join, words=True),
        "memory_bytes": Column("Memory", form=_size),
        "of_budget": Column("of budget", form=percent),
        "flops": Column("FLOPs", form=format_count),
        "parameters": Column("Parameters", form=format_count),
    }
    modules = ({**module, "of_budget": module["memory_bytes"] / budget} for module in found["modules"])
    rows = tuple(tuple(module[key] for key in columns) for module in modules)
    notes = [
        f"whole model {_size(whole)}, budget {percent(budget / whole)} of it, {counted(len(rows), 'module')}, "
        f"{format_count(found['total_flops'])} FLOPs, {format_count(found['parameters'])} parameters"
    ]
    if found["memory_model"] == "measured":
        notes.append(
            "memory is what the most economical exact plan is predicted to take on a CPU: see fedprophet memory"
        )
    title = f"{found['model']}, batch {batch}, budget {_size(budget)}"
    return Page(title, (Table("", tuple(columns.values()), rows),), notes=tuple(notes))


def _size(size: int) -> str:
    return format_size(size, 2)
