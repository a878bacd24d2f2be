"""What is read from a finished run, for the cells of tables and the curves of figures."""

import math
from collections.abc import Callable

import torch

from fedprophet.bench.synthetic import sizes_of
from fedprophet.cascade.atoms import chain_of
from fedprophet.cascade.cost import ChainCost, cost_of
from fedprophet.cascade.partition import Module, partition
from fedprophet.config.config import Config
from fedprophet.models import build
from fedprophet.reproduce.findings import Curve, Values, one
from fedprophet.reproduce.runs import FinishedRun
from fedprophet.runs.evaluator import Kind
from fedprophet.sizes import parse_budget

Reading = Callable[[FinishedRun], float | None]


def best_clean(run: FinishedRun) -> float | None:
    """The personalised accuracy of the round that the paper's tables report, in %."""
    return 100 * run.summary.best.clean if run.summary.best else None


def best_pgd(run: FinishedRun) -> float | None:
    """The same under PGD."""
    return 100 * run.summary.best.adversarial if run.summary.best else None


def accuracy(kind: Kind, attack: str) -> Reading:
    """Return how an accuracy of the trained model is read; `pgd` is that with the run's own number of steps."""

    def read(run: FinishedRun) -> float | None:
        name = f"pgd{run.summary.config.evaluate.steps}" if attack == "pgd" else attack
        cell = run.summary.accuracies.get(kind, {}).get(name)
        return 100 * cell.accuracy if cell else None

    return read


def modules(run: FinishedRun) -> float:
    """How many modules the model was cut into."""
    return len(run.results["modules"])


def smallest_task(run: FinishedRun) -> float:
    """The memory of the smallest task that a client was given, in MB."""
    tasks = [time["memory_bytes"] for record in run.records for time in record.get("times", {}).values()]
    return float(min(tasks)) / 1e6


def first_magnitude(run: FinishedRun) -> float | None:
    """E[max ‖Δz_1‖], as the clients measured it when module 1 was fixed."""
    fixed = (record["fixed"] for record in run.records if "fixed" in record)
    return next((record.get("magnitude") for record in fixed if record["module"] == 1), None)


# The perturbation over rounds ----------------------------------------------------------------------------------------


def model_cost(config: Config) -> ChainCost:
    """Return the cost of a configuration's model; nothing is loaded for it."""
    sizes = sizes_of(config.data)
    with torch.device("meta"):
        chain = chain_of(build(config.model.name, sizes.shape, sizes.classes, **config.model.options))
    return cost_of(chain, sizes.shape, config.train.batch, sizes.classes, config.train.copies)


def model_modules(config: Config, cost: ChainCost) -> tuple[Module, ...]:
    """Return the modules that a configuration cuts its model into."""
    return partition(cost, parse_budget(config.memory.budget, cost.total_memory))


def _per_dimension(run: FinishedRun) -> list[float]:
    """Return, for each module, what its perturbation is divided by: an l2 radius by √d, an l_inf radius by 1."""
    outputs = {atom.name: atom.output[1:] for atom in model_cost(run.summary.config).atoms}
    ends = [module["atoms"][-1] for module in run.results["modules"][:-1]]
    return [1.0, *(math.sqrt(math.prod(outputs[end])) for end in ends)]


def stages(run: FinishedRun) -> Values:
    """Return alpha and the perturbation per dimension at the beginning and the end of each stage, by module."""
    divisors, found = _per_dimension(run), {}
    for number, divisor in enumerate(divisors, start=1):
        records = [record for record in run.records if record.get("module") == number]
        ends = {"first": records[0], "last": records[-1]} if records else {}
        alphas = {f"alpha, {end}": r["alpha"] for end, r in ends.items() if r["alpha"] is not None}
        radii = {f"magnitude, {end}": record["epsilon"] / divisor for end, record in ends.items()}
        cells = {"rounds": len(records), **alphas, **radii}
        found[f"module {number}"] = {name: one(value) for name, value in cells.items()}
    return found


def perturbation_curve(run: FinishedRun) -> Curve:
    """Return the perturbation per dimension over the rounds, divided by stages."""
    divisors = _per_dimension(run)
    records = [record for record in run.records if "module" in record]
    ends = [float(record["round"]) for record in records if "fixed" in record]
    heights = tuple(record["epsilon"] / divisors[record["module"] - 1] for record in records)
    return Curve("perturbation per dimension", tuple(float(r["round"]) for r in records), heights, tuple(ends[:-1]))
