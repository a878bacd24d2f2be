"""`fedprophet memory`: what each module takes to train, on paper and in fact, and how it keeps within a budget."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any

import torch
import typer

from fedprophet.cascade.allocator import spare_memory
from fedprophet.cascade.atoms import Chain, chain_of
from fedprophet.cascade.cost import ChainCost
from fedprophet.cascade.partition import Module, cut_further, partition, smallest_budget
from fedprophet.cli.options import (
    Batch,
    Classes,
    InputShape,
    MemoryModel,
    ModelName,
    ModuleBudget,
    PredictedOptimizer,
    model_cost,
    print_result,
    training_of,
)
from fedprophet.client.budget import TOLERANCE, cheapest, checked, least
from fedprophet.client.iteration import LocalIteration, iteration_of
from fedprophet.client.memory_plan import PLAIN
from fedprophet.client.planned_cost import TriedCost
from fedprophet.display.tables import Column, Page, Table
from fedprophet.errors import BudgetError, ConfigError
from fedprophet.models import build
from fedprophet.progress import progress_bar
from fedprophet.sizes import format_size, parse_budget


def memory_command(
    model: ModelName,
    budget: ModuleBudget,
    input_: InputShape = "3x32x32",
    classes: Classes = 10,
    batch: Batch = 64,
    optimizer: PredictedOptimizer = "sgd-momentum",
    memory_model: MemoryModel = "paper",
    device: Annotated[str, typer.Option(help="What it is planned for, and measured on: cpu, cuda, cuda:1, …")] = "cpu",
    measure: Annotated[bool, typer.Option(help="Train one iteration of each module, and measure it.")] = True,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON, all sizes in bytes.")] = False,
) -> None:
    """Plan how each module trains within a memory budget; predict what that takes, and measure it.

    A module that fits no plan is an answer, too: the table and `fits` in JSON say so, and the exit code is 0.

    Example: fedprophet memory vgg16 --input 3x32x32 --classes 10 --batch 64 --budget 60MB
    """
    training, place = training_of(optimizer, batch), _device(device, measure)
    cost = model_cost(model, input_, classes, batch, optimizer, memory_model, place)
    paper = model_cost(model, input_, classes, batch, optimizer)
    needs = model_cost(model, input_, classes, batch, optimizer, "measured", place)
    with torch.device(place if measure else "meta"):
        chain = chain_of(build(model, cost.input[1:], classes))
    if measure and place.type == "cuda":
        needs = TriedCost.of(cost, chain, training)
    rows = []
    with progress_bar() as watch:
        watch("counting memory", 0, None)
        bytes_ = parse_budget(budget, cost.total_memory)
        coarse = partition(cost, bytes_, lambda: math.ceil(smallest_budget(needs)[0] * (1 + TOLERANCE)))
        modules = cut_further(coarse, cost, needs, bytes_)
        for module in modules:
            watch("modules", module.index, len(modules))
            iteration = iteration_of(chain, cost, module.first, module.last, training, place)
            facts = {**_facts(module, chain, paper), "cut_from": _cut_from(module, coarse)}
            rows.append({**facts, **_measurements(iteration, bytes_, measure)})
    document = {
        "model": model,
        "batch": batch,
        "budget_bytes": bytes_,
        "memory_model": memory_model,
        "planned_for": place.type,
        "device": str(place) if measure else None,
        "modules": rows,
    }
    print_result(document, _page(document), json_)


def _device(name: str, measure: bool) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: memory is measured on cpu or cuda")
    if device.type == "cuda" and measure:
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"--device {name}: this machine has no such GPU. Give cpu, or --no-measure to predict only"
            )
        spare_memory()
        return torch.device("cuda", device.index or 0)
    return device


def _facts(module: Module, chain: Chain, paper: ChainCost) -> dict[str, Any]:
    return {
        "index": module.index + 1,
        "layers": [layer for atom in chain.atoms[module.first : module.last] for layer in atom.layers],
        "atoms": module.last - module.first,
        "paper_bytes": paper.memory(module.first, module.last),
    }


def _cut_from(module: Module, coarse: Sequence[Module]) -> int | None:
    """Return the number of the coarser module that a module was cut out of; None where it is one itself."""
    (whole,) = (each for each in coarse if each.first <= module.first < each.last)
    return None if (whole.first, whole.last) == (module.first, module.last) else whole.index + 1


def _measurements(iteration: LocalIteration, budget: int, measure: bool) -> dict[str, Any]:
    plain = {
        "plain_predicted_bytes": iteration.predicted(PLAIN),
        "plain_measured_bytes": iteration.measured(PLAIN) if measure else None,
    }
    try:
        if measure:
            plan, predicted, measured, aimed, limit = checked(iteration, budget, rounded=True)
        else:
            (plan, predicted), measured, aimed, limit = cheapest(iteration, budget, rounded=True), None, budget, None
    except BudgetError:
        nothing = {"plan": None, "predicted_bytes": least(iteration, rounded=True), "measured_bytes": None}
        return {**plain, **nothing, "planned_for_bytes": None, "limit_bytes": None, "fits": False}
    return {
        **plain,
        "plan": {
            "attack": plan.attack,
            "step": str(plan.step),
            "piece": plan.piece,
            "rounded": plan.rounded,
            "sliced": plan.sliced,
            "attack_sliced": plan.attack_sliced,
            "text": str(plan),
        },
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "planned_for_bytes": aimed,
        "limit_bytes": limit,
        "fits": True,
    }


def _page(found: dict[str, Any]) -> Page:
    columns = {
        "index": Column("Module"),
        "layers": Column("Layers", form=", ".join, words=True),
        "paper_bytes": Column("Paper", form=_size),
        "plain_predicted_bytes": Column("predicted", "Plain", form=_size),
        "plain_measured_bytes": Column("measured", "Plain", form=_size),
        "plan": Column("Plan", form=lambda plan: plan["text"], words=True),
        "predicted_bytes": Column("predicted", "Planned", form=_size),
        "measured_bytes": Column("measured", "Planned", form=_size),
        "fits": Column("Fits", form=lambda fits: _fits(found) if fits else "no"),
    }
    rows = tuple(tuple(module[key] for key in columns) for module in found["modules"])
    where = f"measured on {found['device']}" if found["device"] else "not measured"
    title = f"{found['model']}, batch {found['batch']}, budget {_size(found['budget_bytes'])}, {where}"
    return Page(title, (Table("", tuple(columns.values()), rows),), notes=tuple(_notes(found)))


def _fits(found: dict[str, Any]) -> str:
    """Return what a plan that fits is called: on a GPU nobody knows before it was tried what workspaces will take."""
    return "tensors do" if found["planned_for"] == "cuda" and not found["device"] else "yes"


def _notes(found: dict[str, Any]) -> list[str]:
    notes = []
    if found["planned_for"] == "cuda":
        notes.append(
            "predictions are for a GPU, without workspaces: convolutions take those that the allocator grants"
            + (
                ". Plain is measured without a limit, plans under one"
                if found["device"]
                else ", which may make other plans necessary. Without --no-measure they are tried"
            )
        )
    for whole, parts in groupby(found["modules"], key=lambda module: module["cut_from"]):
        if whole:
            numbers = ", ".join(str(part["index"]) for part in parts)
            notes.append(
                f"module {whole} of the paper's partition fits no exact plan: it is cut into modules {numbers}"
            )
    for module in found["modules"]:
        if not module["fits"]:
            predicted = module["predicted_bytes"]
            why = (
                "none kept within the budget when it was tried"
                if predicted <= found["budget_bytes"]
                else "no plan fits"
            )
            notes.append(
                f"module {module['index']}: {why}; the most economical one is predicted to take {_size(predicted)}. "
                "Try a smaller batch, or a larger budget"
            )
        elif module["planned_for_bytes"] < found["budget_bytes"]:
            notes.append(
                f"module {module['index']}: more was measured than predicted, so that it was planned for "
                f"{_size(module['planned_for_bytes'])}"
            )
    return notes


def _size(size: int) -> str:
    return format_size(size, 2)
